"""`ftcoord dashboard`: a web page for whoever is on call, with the values that the commands show."""
