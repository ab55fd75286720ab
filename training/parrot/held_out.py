"""Two hundred sentences that no training step may see.

The quality gate speaks the first hundred. What is to be decided is tried on the others, so that the
gate's do not choose what they judge.
"""

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

OTHERS = """\
The puppies are sleeping under the kitchen table.
Please bring me a glass of water and the newspaper.
Our teacher told us a funny story about a bear.
I would like to buy two tickets for the late show.
The bridge was closed because of the heavy storm.
My sister works as a nurse in a large hospital.
What time does the last train leave tonight?
He spends most of his money on books and music.
They had to wait three hours at the airport.
The kitchen smells of fresh bread and coffee.
Did you remember to lock the front door?
A small bird built its nest on our balcony.
The meeting has been moved to Thursday afternoon.
She learned to play the piano when she was six.
There are seven days in a week and twelve months in a year.
The old man sat quietly on a bench in the park.
I think we should take the other road next time.
The farmer keeps cows, sheep and a few chickens.
It is too cold to swim in the lake today.
Where can I find a good place to eat near here?
The film was long, but we enjoyed every minute of it.
My father repairs watches and old radios.
You will need a warm coat in the mountains.
The police found the stolen car on Friday.
Nobody was hurt when the roof fell down.
Students must hand in their papers before noon.
The ship carried sugar and cotton across the ocean.
Can you help me carry these boxes upstairs?
The sky turned dark and it started to snow.
We need more time to finish this project.
Her dress is green with white flowers on it.
The judge asked the witness a simple question.
I cannot find my glasses anywhere.
This soup needs a bit more salt and pepper.
The dog barked all night and kept us awake.
Paris is famous for its museums and restaurants.
He was late again because his bus broke down.
The plane landed safely in spite of the fog.
Most people sleep for seven or eight hours.
Let us go for a walk after dinner.
The window is open and the room is full of smoke.
My computer is slow and needs a new battery.
She wrote a letter to her friend in Canada.
The road to the village is narrow and steep.
How many people live in your city?
The king lived in a castle with high walls.
I have already told you everything I know.
They planted apple trees along the river.
The bank is on the corner beside the post office.
Would you rather have tea or orange juice?
The nurse gave him something for the pain.
Our team lost the match by a single point.
A loud noise woke the baby in the next room.
The shop sells shoes, hats and leather bags.
He closed his eyes and listened to the rain.
We spent our holiday on a quiet island.
The president will give a speech this evening.
Why are you standing outside in the dark?
Electric cars are becoming cheaper every year.
The painter used bright colors for the ceiling.
Fish cannot live without water.
My uncle drives a truck from town to town.
The test was harder than anyone expected.
Please turn the music down a little.
She has long brown hair and blue eyes.
The factory makes parts for trains and ships.
I woke up early and made breakfast for everybody.
The moon goes around the earth once a month.
Cats like to sleep in warm and sunny places.
He promised to pay the money back by Monday.
The hotel has forty rooms and a swimming pool.
Do you know who wrote this beautiful song?
The bread is still warm from the oven.
We could see the lights of the town far away.
Her answer surprised all of us.
The boys built a boat out of an old door.
Winter is my favorite season of the year.
It takes ten minutes to walk to the station.
The doctor says that I must rest for a week.
They sold their house and moved to the coast.
The professor gave a lecture about the history of Rome.
My phone number has changed since last summer.
He cut the cake into eight equal pieces.
The clock on the wall has stopped.
You should never give up your dreams.
The workers asked for better pay and shorter hours.
A strong wind blew the leaves across the street.
I am looking for a present for my mother.
The lake is deep and very clear.
She opened the box and found a gold ring.
The soldiers marched through the gate at dawn.
What would you do with a million dollars?
The report was published in the spring.
This chair is more comfortable than that one.
The sick child had a fever and a bad cough.
Every morning he runs five miles before work.
The city council wants to build a new school.
We are out of milk, eggs and butter.
Thank you for inviting us to your wedding.
The train was so crowded that we had to stand.
""".splitlines()


def words(text: str) -> tuple[str, ...]:
    """The words of a text without case and punctuation: what makes two texts the same."""
    return tuple(re.findall(r"[a-z0-9']+", text.lower()))


_KEYS = {words(sentence) for sentence in [*SENTENCES, *OTHERS]}


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
