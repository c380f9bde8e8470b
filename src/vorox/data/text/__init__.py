"""Where text is and what a record of it is: storage, sources, formats, the held-out split."""
