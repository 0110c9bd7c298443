"""Roundelay in the loops of other libraries. Each module here needs the extra of its name, and nothing else imports it."""
