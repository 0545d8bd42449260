from engine_stub.blocks import BlockPool, block_hash
from workerproto.codec import pack

ONE, OTHER = pack([1, 2]), pack([1, 3])
A, B, C = block_hash(b"", ONE), block_hash(b"", OTHER), block_hash(block_hash(b"", ONE), OTHER)


def test_a_hash_covers_all_that_came_before() -> None:
    assert len({A, B, C}) == 3
    assert block_hash(b"", ONE) == A


def test_what_is_let_go_is_found_until_it_is_granted_anew() -> None:
    pool = BlockPool(3)
    first, second, third = pool.grant(3)
    pool.remember(first, A)
    pool.remember(second, C)
    pool.release([first, second])
    assert pool.find([A, C, B]) == [first, second]
    assert pool.grant(1) == [second]  # the end of a chain goes before its beginning
    assert pool.find([A, C]) == [first]
    assert pool.num_unheld([first, second, third]) == 1


def test_a_shared_block_is_free_when_its_last_holder_is_gone() -> None:
    pool = BlockPool(2)
    (block,) = pool.grant(1)
    pool.remember(block, A)
    pool.share([block])
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2
    pool.share(pool.find([A]))
    assert pool.num_free == 1


def test_of_two_equal_blocks_the_first_is_kept() -> None:
    pool = BlockPool(2)
    first, second = pool.grant(2)
    pool.remember(first, A)
    pool.remember(second, A)
    assert pool.find([A]) == [first]
    pool.release([second])
    pool.grant(1)
    assert pool.find([A]) == [first]


def test_without_caching_nothing_is_found() -> None:
    pool = BlockPool(1, caching=False)
    pool.remember(pool.grant(1)[0], A)
    assert pool.find([A]) == []
