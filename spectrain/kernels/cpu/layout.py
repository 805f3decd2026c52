"""How a program writes its operations down for the compiled code that runs them.

An operation is a line of FIELDS whole numbers: its kind, then addresses and sizes, and at the end into how many pieces
it is cut, and whether the next operation may begin before it has ended.
"""

FIELDS = 22
PIECES, GOES_ON = FIELDS - 2, FIELDS - 1
(
    PRODUCT,
    NORM,
    ANGLES,
    ROTATE,
    ATTEND,
    COMBINE,
    SILU,
    COPY,
    MIX,
    WINDOW,
    EMBED,
    ARGMAX,
    PICK,
    KEEP,
    WARP,
    DRAW,
    JUDGE,
    LEAVE,
    COUNT,
    BEND,
    JUDGE_STATES,
    JUDGE_LOGITS,
) = range(22)
TAKEN, DONE, PUBLISHED, STATE_BYTES = 0, 8, 16, 64  # of an operation that runs: see `operations.py`
HEADER = ("n_operations", "table", "states", "own_memory", "own_bytes")  # what `run` is told
MOST_PIECES = 64  # of a product, whose finished pieces are bits of a number
CHUNK = 512  # slots that a thread attends to at a time
BUCKETS = 2048  # of 64 bits that a thread sorts weights into, see `warping.py`
LINE_BYTES = 64  # that processors move at a time
ROOM, LENGTH, GOING, DUE = range(4)  # of `DraftEnds.state`
TEMPERATURE, TOP_P, MIN_P, TOP_K, N_OPTIONS = range(5)  # of a row's sampling, float64
