"""Every CUDA path for real: ``make test-gpu`` runs what is here, plain pytest does not."""
