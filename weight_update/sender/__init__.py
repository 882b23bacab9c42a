"""The trainer's side: encode each update once and serve every worker."""
