"""What is wrong with the log-probs of a batch, found without waiting for the host."""
