"""What a run would take: the plan, toggle sets, several processes, dry runs, machines and prices."""
