"""Measure real training steps and compare them with the prediction."""
