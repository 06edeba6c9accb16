"""What happens on ONE pair of local blocks: statistics of their scores, and gradients. No groups, no losses."""
