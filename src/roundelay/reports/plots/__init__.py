"""Pictures, with matplotlib (the 'plots' extra), imported only when one is asked for."""
