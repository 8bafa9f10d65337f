"""Other libraries' words for a plan: one file per library."""
