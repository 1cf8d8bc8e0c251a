"""The commands of `ftcoord`: one file for each family, with its flags, what it does, and how it shows it."""
