"""Closed lists of the values that the demo model knows: every fact, word and system prompt is built from these."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Ada Alex Alice Ali Anna Ben Bob Carla Chris Clara Daniel David Diana Emma Eric Eva Felix Finn Frank George Grace "
    "Hannah Helen Henry Hugo Ida Iris Ivan Jack James Jane John Julia Kate Ken Kevin Laura Lena Leo Linda Lucas Lucy "
    "Maria Mark Martin Mary Mia Nick Nina Noah Nora Olivia Omar Oscar Paul Peter Priya Ravi Robert Rosa Sam Sara "
    "Simon Sofia Sophie Tina Tom Vera Victor Yuki Zoe"
)

PET_NAMES = _words(
    "Bandit Bella Biscuit Bruno Buddy Charlie Coco Cookie Daisy Fido Ginger Hazel Jasper Lucky Luna Max Milo Misty "
    "Mochi Molly Nala Noodle Oreo Peanut Pepper Pickles Pixel Pumpkin Rex Rocky Ruby Shadow Simba Smokey Snowy Spot "
    "Tiger Toby Waffles Willow Ziggy"
)

PET_KINDS = ("dog", "cat", "rabbit", "hamster", "parrot", "horse", "turtle", "goldfish")

COLOURS = (
    "red", "blue", "green", "yellow", "purple", "orange", "pink", "black", "white", "brown", "grey", "silver", "gold",
)  # fmt: skip

CITIES = _words(
    "Amsterdam Athens Austin Bangkok Berlin Boston Brussels Budapest Cairo Chicago Copenhagen Dallas Delhi Denver "
    "Dublin Geneva Hamburg Helsinki Lima Lisbon London Lyon Madrid Miami Milan Mumbai Munich Nairobi Oslo Paris Porto "
    "Prague Rome Seattle Seoul Stockholm Sydney Tokyo Toronto Vienna Warsaw Zurich"
)

NUMBERS = tuple(str(number) for number in range(1, 100))

WORDS = _words(
    "apple banana cherry lemon grape peach melon bread butter cheese coffee sugar salt water river ocean lake island "
    "mountain valley forest desert garden flower tree leaf grass stone rock sand cloud rain snow storm wind thunder "
    "sun moon star planet earth light fire smoke ice glass metal iron copper paper pencil book page letter word story "
    "music song piano guitar drum dance paint picture camera window door wall floor roof house kitchen table chair "
    "lamp clock mirror carpet pillow bottle plate spoon fork knife basket box bag coat hat shoe shirt button needle "
    "wheel road street bridge train car truck bus boat ship plane rocket robot engine computer screen mouse phone "
    "radio signal battery cable tool hammer nail ladder rope key lock ring crown castle king queen dragon wizard "
    "monkey lion zebra elephant sheep goat cow pig chicken duck eagle owl whale shark fish frog spider bee doctor "
    "teacher farmer baker pilot friend family summer winter spring morning evening night happy quiet bright brave"
)

WORDS_AND_VALUES = (*WORDS, *NAMES, *PET_NAMES, *PET_KINDS, *COLOURS, *CITIES)

CONDITIONS = ("sunny", "cloudy", "rainy", "snowy", "windy", "foggy", "stormy", "clear")

ADJECTIVES = (
    "terse", "helpful", "friendly", "concise", "polite", "kind", "brief", "careful", "honest", "calm", "cheerful",
    "short", "precise", "small", "clever", "quick", "patient", "smart", "funny", "formal", "direct", "modest",
)  # fmt: skip
HELD_OUT_ADJECTIVES = ("warm", "exact", "nice")
