"""Words: frozen values, units, errors and the card table. Imports nothing of ours."""
