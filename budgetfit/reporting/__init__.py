"""What a user reads: values in, text or JSON out. Nothing here computes a number."""
