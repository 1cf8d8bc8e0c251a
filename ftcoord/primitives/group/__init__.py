"""The mechanism: a group of members and one decided record."""
