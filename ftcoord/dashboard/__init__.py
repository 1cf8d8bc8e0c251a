"""`ftcoord dashboard`: one page for whoever is on call, from the same values as the commands."""
