from dataclasses import replace

from budgetfit.core.block_profile import ChainProfile
from budgetfit.solvers.host_limit import chains_within
from tests.solvers.chains import block, chain_of, option, seeded


def most_on_host(chain: ChainProfile) -> int:
    return sum(max(each.host_bytes for each in row.options) for row in chain.blocks)


def test_no_plan_of_a_limited_chain_is_above_the_limit_on_host_memory() -> None:
    rnd = seeded(320)
    keep = option("keep", 20, 20, 4)
    used = 0
    for _ in range(300):
        chain = chain_of(
            *(
                block(
                    f"layers.{number}",
                    keep,
                    replace(option("offload", 1, 20, 4), host_bytes=rnd.randint(1, 50)),
                )
                for number in range(rnd.randint(1, 8))
            )
        )
        limit_bytes = rnd.randint(0, 120)
        found = [most_on_host(each) for each in chains_within(chain, limit_bytes)]
        assert found
        assert max(found) <= limit_bytes
        used += max(found) > limit_bytes // 2
    assert used > 100
