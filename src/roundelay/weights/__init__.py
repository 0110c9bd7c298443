"""A learner's weights: flat buffers for exchanges, and how the module's own weights follow them."""
