"""What other corrections would have done to recorded rollouts, side by side."""
