"""What a run gives away: the winner's source cleaned, and a folder that serves it and shows its evidence."""
