"""Evidence for the doctor: where this host would lose packets of the network."""
