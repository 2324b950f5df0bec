"""What the driver is made of: sampling ahead, staging, progress, the ledger."""
