"""Plots with matplotlib (the 'plots' extra), which is imported when a plot is drawn."""
