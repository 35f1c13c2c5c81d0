"""The draft's side of a round: trunk, backup chains, forks and branches."""
