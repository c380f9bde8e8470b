"""This machine and what is installed on it: records of both, and what libraries need before their import."""
