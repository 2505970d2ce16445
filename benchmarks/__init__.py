"""What is measured, and how: every number that this project states about speed or memory comes from here."""
