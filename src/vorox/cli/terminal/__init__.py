"""What commands print: numbers for people, tables, JSON, progress, and streams that survive a broken pipe."""
