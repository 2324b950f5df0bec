"""The policy model on its ranks: forward pass, loss, optimiser updates, state, and weights to send."""
