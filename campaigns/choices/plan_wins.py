"""Which plans the shipped tables chose: in how many rows each plan of an operator was tried, and in how many it won.

    python -m campaigns.plan_wins

near: the rows in which the plan's best candidate took at most 2 % longer than the winner. A plan that was tried and is
never near has no reason to stay, unless a paper names it.
"""

from __future__ import annotations

from collections import Counter

from overweave.tuner.store.cache import decode, shipped_files

NEAR = 1.02


def counts() -> tuple[int, dict[tuple[str, str], Counter[str]]]:
    """The number of rows, and for each operator and plan how often it was tried, won, and near the winner."""
    rows, found = 0, dict[tuple[str, str], Counter[str]]()
    for data in shipped_files().values():
        for entry in decode(data).entries:
            rows += 1
            best = min(entry.times, key=lambda time: time.us)
            for plan in dict.fromkeys(time.plan for time in entry.times):
                us = min(time.us for time in entry.times if time.plan == plan)
                told = found.setdefault((entry.problem.operator, plan), Counter())
                told.update(tried=1, won=plan == best.plan, near=us <= NEAR * best.us)
    return rows, found


def main() -> None:
    rows, found = counts()
    print(f"{rows} tuned rows")
    for (operator, plan), told in sorted(found.items(), key=lambda item: (item[0][0], -item[1]["won"])):
        print(f"{operator:22s} {plan:18s} tried {told['tried']:3d}  won {told['won']:3d}  near {told['near']:3d}")


if __name__ == "__main__":
    main()
