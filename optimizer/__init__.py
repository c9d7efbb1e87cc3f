"""The compiler: traffic profiles, agents, board, cost model, tiers, verification, the search loop and its report. Torch-free."""
