"""What a completion is worth: graders, the processes they run in, and the weighted sum of rewards."""
