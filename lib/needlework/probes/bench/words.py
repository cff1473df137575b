"""Own word lists, small grammars for haystacks (records that no model has memorised), and the values of needles.

Every line ends with a full stop or a closing mark and a line break, so that the token counts of lines add up. No line
says "secret code", "is" before a number, or holds a number of five or more digits: those belong to the needles.
"""

from __future__ import annotations

from random import Random


def _words(text: str) -> list[str]:
    return text.split()


def _phrases(text: str) -> list[str]:
    return " ".join(text.split()).split("; ")


ADJECTIVES = _words("""
amber ancient autumn basalt bitter bronze candid cedar coastal copper coral crimson crooked curious distant dusty
eager ebony faded fern flint forgotten frosty gentle gilded glass granite hidden hollow humble indigo iron ivory
jade lantern linen lively lunar maple marble meadow midnight misty narrow northern oaken olive opal painted paper
patient pearl pewter quiet restless russet rustic saffron scarlet shaded silent silver slate sleepy solar southern
spotted spring steady sturdy sunken tidal timber twilight velvet violet wandering weathered western willow winter
wooden woven
""")
NOUNS = _words("""
acorn anchor anvil archive arrow badger barrel basin beacon bellows bobbin bridge bucket cabin candle canoe canyon
cart castle chimney cistern cloak compass cradle crane crater dagger drum eagle engine falcon feather ferry fiddle
fountain galley garden gate glacier goblet hammer harbor harp hatchet heron hinge island kettle kiln ladder lamp
lark locket loom magpie mill mirror mortar mosaic orchard otter owl paddle pebble pendulum pier pillar plough pulley
quarry raven reef ribbon river saddle sail satchel schooner shield shuttle signal sparrow spindle spire stag statue
summit tanner temple thimble tower trellis tunnel turbine valley vessel violin wagon walnut wharf wheel whistle
windmill
""")
PLACES = _words("""
Abrenth Aldermoor Balqua Bexholm Brivane Caldrow Corvesk Dalmere Dunhallow Elsbeck Fenwray Galdor Glenmarsh
Harrowick Hestvale Ilverton Jorvane Kelbrook Kestmoor Lanshire Lorwick Marrowby Mistrand Nareth Norbeck Oldcairn
Ostvar Pellworth Quenby Ravelow Rookhurst Sandrake Selwyth Stonemere Tarvik Thornby Ulverne Valmoor Vexford Wendrake
Westmarch Wyncote Yarlsey Zelmoor
""")
PEOPLE = _words("""
Ines Ravi Tomas Amara Jonas Leila Piotr Greta Mateo Noor Sven Yuki Clara Idris Petra Hugo Farah Anton Mei Oskar
Dalia Bruno Keiko Luis Nadia Emil Rosa Viktor Zara Felix
""")
ITEMS = _words("""
washers gaskets ropes lanterns hinges tiles buckets brushes valves cables pulleys crates bolts planks filters
bearings sacks ladders drums nails hoses panels blankets barrels clamps
""")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
PARTS = _words("""
scheduler parser exporter importer gateway indexer poller mailer renderer compactor watcher planner
""")
DEEDS = _words("""
flushed rotated merged skipped archived reloaded trimmed renamed mounted released verified queued copied drained
""")
THINGS = _words("""
rows segments batches files leases sessions blocks tickets parcels snapshots frames cursors
""")
MOODS = _phrases("""
the queue held steady; nobody complained; the fans stayed quiet; the disk was half full; the next pass was on time;
the alarm kept silent; the backlog went down; the operators saw no change
""")
TOPICS = _phrases("""
the harbour crane; the winter timetable; the leaking roof; the new loading ramp; the visitors' book; the east
stairwell; the delivery van; the bicycle shed; the annual picnic; the broken scale; the library shelves; the canteen
menu
""")
WISHES = _phrases("""
painted before spring; moved behind the office; sold at a fair price; kept as it stands; repaired by an outside
firm; shown at the next meeting; measured again in summer; left to the younger members
""")
MOVES = _phrases("""
the group agreed to wait; a vote was put off; nobody objected; two members wanted figures first; the chair thanked
everyone; the matter goes on the list for autumn
""")
ACTIONS = _phrases("""
keeps a small buffer; walks the tree twice; drops empty fields; sorts by arrival; copies the header first; rounds
towards zero; waits for a quiet moment; reads one line ahead
""")
REASONS = _phrases("""
wide tables stay aligned; old files still open; the order never changes; slow clients are not cut off; two writers
cannot meet; the tests stay fast; a half-written page is seen; the reader may stop early
""")


def log_line(r: Random) -> str:
    return (
        f"Day {r.randrange(1, 366)}, {r.choice(PARTS)} {r.choice(ADJECTIVES)} {r.choice(DEEDS)} {r.randrange(2, 999)} "
        f"{r.choice(THINGS)} in {r.randrange(3, 900)} ms and {r.choice(MOODS)}.\n"
    )


def stock_note(r: Random) -> str:
    return (
        f"Bay {r.randrange(1, 99)} holds {r.randrange(4, 990)} {r.choice(ADJECTIVES)} {r.choice(ITEMS)}, counted by "
        f"{r.choice(PEOPLE)} on {r.choice(DAYS)} the {r.randrange(1, 31)}th and stacked near the "
        f"{r.choice(NOUNS)} door.\n"
    )


def minutes_note(r: Random) -> str:
    return (
        f"{r.choice(PEOPLE)} asked {r.choice(PEOPLE)} whether {r.choice(TOPICS)} beside the {r.choice(ADJECTIVES)} "
        f"{r.choice(NOUNS)} should be {r.choice(WISHES)}; after {r.randrange(3, 90)} minutes {r.choice(MOVES)}.\n"
    )


def code_comment(r: Random) -> str:
    return (
        f"# the {r.choice(ADJECTIVES)} {r.choice(PARTS)} {r.choice(ACTIONS)} for {r.randrange(2, 600)} "
        f"{r.choice(THINGS)} so that {r.choice(REASONS)} (see the {r.choice(NOUNS)} notes, "
        f"page {r.randrange(2, 400)}).\n"
    )


def table_row(r: Random) -> str:
    return (
        f"| {r.randrange(100, 999)} | {r.choice(ADJECTIVES)} {r.choice(ITEMS)} | {r.randrange(2, 80)} m | shelf "
        f"{r.choice('ABCDEFGHJK')} | {r.choice(PEOPLE)} | {r.choice(DAYS)} |\n"
    )


def noise_line(r: Random) -> str:
    """The same sentence every time: a named worst case for top-k with ties, not a haystack."""
    return "The grass grows green. The sky looks blue. The sun shines warm. Here we go. There and back again.\n"


GENRES = {
    "log": log_line,
    "stock": stock_note,
    "minutes": minutes_note,
    "code": code_comment,
    "table": table_row,
    "noise": noise_line,
}
MIXED = ("log", "stock", "minutes", "code")


def unit(genre: str, r: Random) -> str:
    """One line of the genre; "mixed" draws among four of them."""
    return GENRES[r.choice(MIXED) if genre == "mixed" else genre](r)


def key_phrase(r: Random, taken: set[str] | None = None) -> str:
    """A key such as "the amber falcon of Tarvik"; none of its three words is used twice within `taken`."""
    for _ in range(10_000):
        words = (r.choice(ADJECTIVES), r.choice(NOUNS), r.choice(PLACES))
        if taken is None:
            break
        if not taken.intersection(words):
            taken.update(words)
            break
    else:
        raise ValueError("too many key phrases in one prompt; ask for fewer needles or distractors")
    return f"the {words[0]} {words[1]} of {words[2]}"


# ---- values: graded digit by digit, with a check digit that exposes a mixed answer ----

KINDS = ("digits5", "digits7", "uuid", "words2", "word_number")


def check_digit(digits: str) -> str:
    """Luhn's check digit of a string of digits: any single wrong digit and most swaps change it."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (2 if place % 2 == 0 else 1)
        total += value - 9 if value > 9 else value
    return str(-total % 10)


def draw(kind: str, r: Random) -> str:
    """A value of the kind; raises ValueError for an unknown kind."""
    if kind in ("digits5", "digits7"):
        length = int(kind[-1])
        body = str(r.randrange(1, 10)) + "".join(r.choice("0123456789") for _ in range(length - 2))
        return body + check_digit(body)
    if kind == "uuid":
        raw = f"{r.getrandbits(128):032x}"
        return f"{raw[:8]}-{raw[8:12]}-4{raw[13:16]}-a{raw[17:20]}-{raw[20:]}"
    if kind == "words2":
        return f"{r.choice(ADJECTIVES)} {r.choice(NOUNS)}"
    if kind == "word_number":
        return f"{r.choice(NOUNS)}-{r.randrange(1000, 9999)}"
    raise ValueError(f"unknown kind of needle value {kind!r}; choose one of {', '.join(KINDS)}")


def neighbour(value: str, r: Random) -> str:
    """A value that differs in one digit (or the first letter): a distractor that only careful reading tells apart."""
    places = [i for i, c in enumerate(value) if c.isdigit()] or [0]
    place = r.choice(places)
    old = value[place]
    new = r.choice([c for c in ("0123456789" if old.isdigit() else "bcdfgklmnprst") if c != old.lower()])
    return value[:place] + new + value[place + 1 :]
