"""Small uses of the group for users: an election, a barrier."""
