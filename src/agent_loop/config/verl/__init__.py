"""Settings of verl: what they are here."""
