"""The hundred sentences that no training step may see; the quality gate speaks them."""

from __future__ import annotations

import re
from collections.abc import Iterable

SENTENCES = """\
Hello, I am a parrot, and I can talk.
The weather is very nice today, isn't it?
My favorite number is twenty seven.
Artificial intelligence is changing the world.
Please open the window and close the door.
Computers can learn to speak with very small models.
Good morning, how can I help you today?
This voice was trained on a laptop in one hour.
Hi there!
Yes, that sounds good to me.
The children are playing in the garden behind the house.
She bought three apples and a loaf of bread at the market.
Can you tell me the way to the station?
I will call you back in half an hour.
The internet connects people all over the world.
We should meet for lunch on Wednesday.
Water boils at one hundred degrees.
He has been working on this problem for several years.
Nobody knows what will happen tomorrow.
The second speaker enters before the first one has finished.
Do you want milk or sugar in your coffee?
It was raining when we left the office.
A good teacher explains difficult things in simple words.
The library opens at nine and closes at six.
My brother lives in a small village near the mountains.
What is the capital of France?
The battery of my phone is almost empty.
They built a new bridge across the river last year.
Reading is one of my favorite activities.
The doctor told him to drink more water.
Every language has its own rhythm and melody.
I forgot my keys, so I could not open the door.
The concert starts at eight o'clock in the evening.
Our neighbors have two dogs and a very old cat.
How long does it take to learn a foreign language?
The science museum is closed on Mondays.
Turn left at the next corner and go straight ahead.
She speaks quickly, but her voice is easy to understand.
The train to Boston leaves from platform four.
There is a strange noise coming from the kitchen.
You can change the settings at any time.
My grandmother makes the best soup in the world.
The price of oil has gone up again this month.
He opened the letter with trembling hands.
Thank you for your patience.
The sun rises in the east and sets in the west.
I have never seen such a beautiful picture before.
The company wants to hire twenty new people this summer.
Do not forget to turn off the lights.
This machine can process thousands of requests every second.
We walked along the beach until it was dark.
Is there anything else that I can do for you?
The student asked an interesting question about history.
Music makes people happy.
Most birds can fly, but some of them cannot.
The police are looking for two men in a black car.
I would rather stay at home tonight.
The answer to your question is on the last page.
She has lived in this city since she was born.
A short message is better than a long silence.
The new software will be available next week.
Why did you leave the party so early?
The old man sat quietly under a tree and read his book.
Cheese and bread taste wonderful together.
In winter the lake freezes and we go skating.
The engineer repaired the engine in less than ten minutes.
Sorry, I did not hear what you said.
The moon was bright and the streets were silent.
You have to be careful with sharp knives.
The government announced a plan to protect the forests.
His first book sold more than one million copies.
The baby has been sleeping all afternoon.
I think we are going in the wrong direction.
Every morning she runs five miles through the park.
The keyboard and the screen are on the table.
It is easier to ask for help than to do everything alone.
The farmer has forty sheep and eleven horses.
Could you speak a little more slowly, please?
The history of this town goes back many centuries.
A network of small computers can solve large problems.
Where did you put the blue umbrella?
The team won the game in the last minute.
We need fresh ideas and a lot of courage.
The plane landed safely in spite of the storm.
My sister is afraid of spiders and snakes.
Tell me a story about the sea.
The meeting was moved from Tuesday to Friday.
Nothing is as valuable as good health.
The red flowers in the corner smell very sweet.
He counted to three and jumped into the cold water.
Let's see what we can learn from this experiment.
The teacher wrote a long sentence on the board.
Our journey began on a quiet morning in September.
Robots will help us to explore other planets.
The soup is too hot to eat right now.
I believe that honest work is always rewarded.
The museum has a large collection of ancient coins.
No, thank you, I am not hungry.
The last bus had already gone when we arrived.
See you later, and take care!
""".splitlines()


def words(text: str) -> tuple[str, ...]:
    """The words of a text without case and punctuation: what makes two texts the same."""
    return tuple(re.findall(r"[a-z0-9']+", text.lower()))


_KEYS = {words(sentence) for sentence in SENTENCES}


def without_held_out(lines: Iterable[str]) -> list[str]:
    """The lines that neither are nor contain a held-out sentence of four words or more.

    Shorter held-out sentences ("Hi there!") are left out only where a line says just that.
    """
    spans = {key for key in _KEYS if len(key) >= 4}
    lengths = sorted({len(key) for key in spans})

    def is_clean(line: str) -> bool:
        spoken = words(line)
        if spoken in _KEYS:
            return False
        return not any(
            spoken[start : start + length] in spans
            for length in lengths
            for start in range(len(spoken) - length + 1)
        )

    return [line for line in lines if is_clean(line)]
