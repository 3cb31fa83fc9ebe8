"""What a run would take: the plan, switch sets, several processes, dry runs and prices."""
