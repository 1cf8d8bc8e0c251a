"""`ftcoord dashboard`: a web page with the reports that the commands print, live."""
