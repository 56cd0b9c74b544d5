"""Curvature: how much each weight of a trained model matters to what it says."""
