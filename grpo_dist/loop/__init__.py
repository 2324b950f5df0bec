"""The parts of the training loop: sampling ahead, staging, progress, the ledger."""
