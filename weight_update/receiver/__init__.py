"""The worker's side: stage an update, switch to it between two forward passes, acknowledge it."""
