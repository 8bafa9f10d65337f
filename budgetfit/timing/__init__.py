"""From arithmetic to time: what each op of a trace takes on a card. No torch."""
