"""`ftcoord demo`: a small elastic training job that loses its first agent and goes on."""
