"""Settings of verl: their names here, and the conversion of launch scripts."""
