"""Everyday sentences from templates: modern words that no old book has, in plausible company.

A template's `{slot}` is filled with a random entry of `SLOTS`, which may have slots itself.
"""

from __future__ import annotations

import random
import re

from training.parrot.spoken_numbers import CLOCK_TIMES, in_words, spaced

_SLOT = re.compile(r"\{(\w+)\}")


def _list(text: str) -> list[str]:
    """Entries separated by commas, newlines ignored."""
    return [entry.strip() for entry in text.replace("\n", " ").split(",") if entry.strip()]


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


# Read out letter by letter.
ACRONYMS = spaced(
    """AI TV USA UK UN EU PC CPU GPU API URL LLM TTS ASR CEO FBI CIA BBC DVD CD ID DNA IBM HTTP HTML
    SQL PDF USB GPS ATM FAQ VIP DIY NHS SMS OCR SSD IP MIT NBA NFL CNN PHP XML CSS"""
)

SLOTS: dict[str, list[str]] = {
    "person": _list(
        """Alice, Bob, Carol, David, Emma, Frank, Grace, Henry, Irene, Jack, Kate, Leo, Mary, Nick,
        Olivia, Peter, Rose, Sam, Tom, Victor, Wendy, Anna, John, Paul, Sarah, Lucy, Mike, Julia,
        Daniel, Laura, Simon, Helen, Polly, Max, Nina, Oscar, Ruth, Steve, Tina, William, Michael,
        James, Robert, Linda, Susan, Karen, Lisa, Nancy, Betty, Thomas, George, Edward, Andrew,
        Maria, Ben, Chris, Eva, Jane, Martin, Sophie"""
    ),
    "city": _list(
        """London, Paris, Berlin, Tokyo, Rome, Madrid, Boston, Chicago, Sydney, Dublin, Vienna,
        Prague, Moscow, Cairo, Delhi, Beijing, Seattle, Denver, Oxford, Cambridge, New York, Texas,
        California, Washington, Toronto, Lisbon, Athens, Geneva, Hamburg, Munich, Milan"""
    ),
    "country": _list(
        """France, Germany, Italy, Spain, England, Ireland, Scotland, China, Japan, India, Brazil,
        Canada, Mexico, Egypt, Russia, Poland, Sweden, Norway, Greece, Turkey, America, Africa,
        Europe, Asia, Australia"""
    ),
    "tongue": _list(
        """English, French, German, Spanish, Italian, Chinese, Japanese, Russian, Arabic, Latin,
        Greek, Portuguese, Polish, Dutch"""
    ),
    "day": _list("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"),
    "month": _list(
        """January, February, March, April, May, June, July, August, September, October, November,
        December"""
    ),
    "season": _list("spring, summer, autumn, winter"),
    "clock": CLOCK_TIMES,
    "when": _list(
        """today, tomorrow, tonight, yesterday, this morning, this evening, this afternoon, now,
        right now, next week, last week, next year, last year, last night, every day, every night,
        every week, on {day}, in {month}, at {clock}, in the {season}, soon, later, at the moment,
        all day, all night, once a week, twice a day, in {count} minutes, in {count} hours,
        {count} days ago, for {count} years, since {month}, before {clock}, after {clock},
        at noon, at midnight, in the morning, in the evening, at the weekend"""
    ),
    "color": _list(
        """red, green, blue, yellow, orange, purple, black, white, brown, grey, gray, pink, golden,
        silver"""
    ),
    "animal": _list(
        """cat, dog, bird, parrot, horse, cow, sheep, fish, mouse, lion, tiger, bear, fox, wolf,
        rabbit, duck, goose, monkey, elephant, whale, chicken, pig, goat, frog, snake, turtle, bee,
        butterfly, spider, owl, eagle, shark, dolphin, camel, donkey, penguin, kitten, puppy"""
    ),
    "food": _list(
        """bread, cheese, butter, milk, water, coffee, tea, juice, soup, pizza, rice, pasta, salad,
        chocolate, cake, sugar, salt, pepper, fruit, meat, fish, chicken, honey, lemon, ice cream,
        breakfast, lunch, dinner, wine, beer, vegetables, potatoes, tomatoes, eggs, apples,
        oranges, bananas, onions, sandwiches"""
    ),
    "thing": _list(
        """computer, phone, telephone, table, chair, window, door, car, train, book, letter,
        picture, bottle, cup, glass, plate, knife, spoon, fork, apple, orange, cake, radio, camera,
        keyboard, screen, speaker, microphone, laptop, robot, machine, engine, ticket, bag, coat,
        hat, shoe, shirt, clock, watch, lamp, candle, mirror, blanket, pillow, hammer, ladder, box,
        key, pen, pencil, paper, newspaper, magazine, map, card, coin, wallet, umbrella, bicycle,
        bike, bus, truck, boat, ship, plane, airplane, motor, wheel, television, printer, battery,
        cable, button, switch, light, desk, bed, sofa, carpet, basket, bucket, brush, towel, soap,
        guitar, piano, violin, drum, ball, toy, doll, ring, gift, present, flag, tool, needle,
        rope, brick, stone, stick, leaf, flower, rose, tree, file, folder, message, password,
        account, email, photo, video, website, program, document, report, contract, bill, receipt"""
    ),
    "place": _list(
        """house, garden, kitchen, bathroom, bedroom, living room, office, school, university,
        college, hospital, library, museum, theater, cinema, restaurant, hotel, station, airport,
        park, forest, village, town, city, bridge, street, road, tower, castle, church, island,
        beach, river, lake, mountain, valley, field, farm, market, shop, store, bank, factory,
        harbor, square, hall, room, building, corner, basement, garage, yard, desert, ocean, sea,
        sky, world, country, laboratory, studio, classroom, court, prison, stadium, gym"""
    ),
    "job": _list(
        """teacher, doctor, nurse, farmer, engineer, student, writer, painter, singer, driver,
        pilot, sailor, soldier, lawyer, judge, cook, baker, waiter, gardener, scientist, professor,
        programmer, manager, president, minister, king, queen, artist, actor, musician, reporter,
        photographer, secretary, director, designer, mechanic, dentist, policeman, guard, guide,
        neighbor, friend, brother, sister, mother, father, uncle, aunt, cousin, grandmother,
        grandfather, son, daughter, boy, girl, man, woman, child, boss, customer, guest, visitor,
        player, captain, captain, leader, owner, worker, speaker, reader, listener"""
    ),
    "people": _list(
        """people, children, students, teachers, scientists, engineers, friends, neighbors, women,
        men, girls, boys, parents, families, workers, players, visitors, customers, doctors,
        researchers, users, developers, readers, soldiers, artists, animals, birds, machines,
        computers, robots, companies"""
    ),
    "idea": _list(
        """language, music, history, science, art, nature, love, time, money, work, health, peace,
        war, freedom, justice, truth, knowledge, education, business, politics, sport, weather,
        energy, electricity, technology, information, communication, research, software, hardware,
        data, speech, sound, silence, noise, voice, memory, attention, learning, intelligence,
        artificial intelligence, machine learning, the internet, the future, the past, the world,
        the climate, the economy, the government, the network, the system, the process, the law,
        religion, philosophy, mathematics, physics, chemistry, biology, medicine, literature,
        poetry, culture, society, tradition, experience, progress, safety, security, quality,
        happiness, friendship, courage, patience, success, power, change, growth"""
    ),
    "tech": _list(
        """computer, network, server, model, language model, neural network, program, system,
        database, processor, memory, algorithm, browser, website, application, app, robot, device,
        sensor, satellite, microphone, speaker, keyboard, engine, battery, chip, cable, router,
        machine, assistant, search engine, data center, operating system, user interface,
        transformer, decoder, encoder, tokenizer, vocoder, pipeline, scheduler, cache, library,
        framework, function, method, module, process, thread, queue, stream, buffer, packet,
        signal, channel, frame, sample, token, layer, weight, vector, matrix, graph"""
    ),
    # Written with points, as the tokenizer's normaliser writes them.
    "acronym": [f"{'.'.join(letters)}." for letters in ACRONYMS],
    "adj": _list(
        """good, bad, big, small, new, old, happy, sad, warm, cold, hot, nice, quick, slow, bright,
        dark, quiet, loud, funny, strange, beautiful, simple, easy, hard, clean, dirty, empty, full,
        early, late, young, kind, clever, brave, lovely, wonderful, great, little, long, short,
        fresh, sweet, heavy, light, soft, strong, weak, rich, poor, cheap, expensive, important,
        interesting, boring, difficult, dangerous, safe, careful, famous, popular, modern, ancient,
        common, rare, special, perfect, terrible, pleasant, serious, friendly, honest, gentle,
        angry, tired, hungry, thirsty, busy, lazy, lucky, curious, proud, polite, patient, smart,
        wise, crazy, wet, dry, deep, high, low, wide, narrow, thick, thin, round, flat, sharp, free,
        ready, sure, real, true, wrong, right, possible, impossible, necessary, useful, useless,
        public, private, local, global, national, international, social, political, economic,
        natural, artificial, digital, electric, electronic, mechanical, scientific, original,
        excellent, amazing, incredible, fantastic, favorite, typical, normal, similar, different"""
    ),
    "adv": _list(
        """quickly, slowly, quietly, loudly, carefully, happily, sadly, easily, suddenly, finally,
        usually, often, always, never, sometimes, probably, perhaps, certainly, clearly, exactly,
        nearly, almost, really, simply, already, still, together, alone, again, immediately,
        recently, directly, completely, perfectly, gently, politely, patiently, honestly,
        automatically, correctly, actually, especially, generally, hardly"""
    ),
    "verb": _list(
        """see, hear, find, take, bring, make, open, close, read, write, play, watch, buy, sell,
        carry, hold, clean, fix, break, paint, draw, move, send, show, use, want, need, like, love,
        know, remember, forget, understand, build, change, check, choose, copy, cut, describe,
        design, discover, explain, explore, follow, give, hide, improve, keep, learn, leave, lose,
        measure, open, order, pay for, prepare, protect, pull, push, put away, repair, replace,
        return, save, share, start, stop, study, test, throw away, touch, train, translate, try,
        turn on, turn off, visit, wash, wait for, look at, listen to, talk about, think about,
        ask for, look for, pick up, work on, print, download, update, install, delete, connect"""
    ),
    "past": _list(
        """saw, heard, found, took, brought, made, opened, closed, read, wrote, played, watched,
        bought, sold, carried, held, cleaned, fixed, broke, painted, drew, moved, sent, showed,
        used, wanted, needed, liked, loved, knew, remembered, forgot, understood, built, changed,
        checked, chose, described, designed, discovered, explained, explored, followed, gave away,
        hid, improved, kept, learned, left, lost, measured, ordered, paid for, prepared, protected,
        pulled, pushed, repaired, replaced, returned, saved, shared, started, stopped, studied,
        tested, touched, translated, visited, washed, waited for, looked at, listened to,
        talked about, thought about, asked for, looked for, picked up, worked on, printed"""
    ),
    "doing": _list(
        """seeing, hearing, finding, taking, bringing, making, opening, closing, reading, writing,
        playing, watching, buying, selling, carrying, holding, cleaning, fixing, painting, drawing,
        moving, sending, showing, using, building, changing, checking, describing, designing,
        explaining, following, improving, learning, leaving, losing, measuring, ordering,
        preparing, repairing, saving, sharing, starting, stopping, studying, testing, translating,
        visiting, washing, waiting for, looking at, listening to, talking about, thinking about,
        asking for, looking for, working on, training, downloading, updating, installing"""
    ),
    "goes": _list(
        """runs, walks, sleeps, sings, dances, laughs, cries, smiles, waits, works, plays, reads,
        speaks, talks, listens, thinks, learns, stands, sits, swims, flies, falls, jumps, travels,
        lives, stays, comes, goes, arrives, leaves, starts, stops, grows, changes, shines, moves,
        helps, wins, fails, turns, burns, breaks, answers, asks, looks, dreams, cooks, drives"""
    ),
    "went": _list(
        """ran, walked, slept, sang, danced, laughed, cried, smiled, waited, worked, played, spoke,
        talked, listened, stood, sat, swam, flew, fell, jumped, traveled, lived, stayed, came, went,
        arrived, left, started, stopped, grew, changed, moved, helped, won, failed, turned,
        answered, asked, looked, dreamed, cooked, drove, called, returned, disappeared"""
    ),
    "who": _list(
        """I, you, we, they, he, she, the {job}, my {job}, our {job}, {person}, your {job},
        the {adj} {job}, a {adj} {job}, some {people}, many {people}, most {people}, the {people},
        everybody, somebody, nobody, everyone, someone"""
    ),
    "single": _list(
        """he, she, it, the {job}, my {job}, our {job}, {person}, your {job}, the {animal},
        the {adj} {job}, a {adj} {animal}, the {tech}, the {thing}, everybody, nobody"""
    ),
    "what": _list(
        """the {thing}, a {thing}, the {adj} {thing}, a {adj} {thing}, my {thing}, your {thing},
        his {thing}, her {thing}, our {thing}, their {thing}, this {thing}, that {thing},
        the {color} {thing}, a {color} {thing}, some {food}, the {food}, the {tech}, a new {tech},
        {count} {thing}s, the {animal}, a {adj} {animal}, the {place}, that {place}, it, them,
        everything, something, nothing, the {thing} and the {thing}, another {thing},
        the first {thing}, the last {thing}, the {thing} of the {job}"""
    ),
    "where": _list(
        """in the {place}, at the {place}, near the {place}, behind the {place}, on the {thing},
        under the {thing}, in the {adj} {place}, in {city}, in {country}, from {city}, outside,
        at home, at work, at school, in front of the {place}, next to the {thing}, here, there,
        across the {place}, around the {place}, above the {place}, between the {place} and the
        {place}, over there, upstairs, downstairs, everywhere, on the left, on the right,
        on the other side of the {place}, in the middle of the {place}, far away"""
    ),
    "why": _list(
        """because {who} {went}, because it is {adj}, because it was {adj}, because of the {thing},
        because we {past} {what}, because the {tech} is {adj}, because {idea} is {adj}"""
    ),
    "link": _list("and, but, so, because, when, while, before, after, although, if, until, since"),
    "must": _list(
        """can, could, will, would, should, must, may, might, have to, want to, need to,
        would like to, cannot, can't, won't, don't, didn't, couldn't, shouldn't"""
    ),
    "greeting": _list(
        """hello, hi, hey, good morning, good evening, good afternoon, good night, welcome,
        thank you, thanks, sorry, excuse me, please, yes, no, okay, well, of course, sure,
        all right, never mind, goodbye, bye, see you soon, see you later, see you tomorrow,
        nice to meet you, take care, no problem, you are welcome, not yet, of course not, maybe,
        me too, I see, I know, I think so, I don't know, I don't think so, that's right, good luck,
        have fun, well done, congratulations, happy birthday, come in, sit down, wait a minute,
        one moment, just a second, let's go, come on, hurry up, be careful, look out, oh no, wow,
        how are you, what's up, how do you do, what happened, why not, what's next, who is it,
        who are you, where are you, are you there, is that so, really, what, why, when, how"""
    ),
}

SENTENCES = _lines(
    """\
{who} {past} {what} {when}.
{who} {past} {what} {where}.
{who} {past} {what} {where} {when}.
{who} {went} {where}.
{who} {went} {where} {when}.
{who} {adv} {past} {what}.
{who} {must} {verb} {what}.
{who} {must} {verb} {what} {when}.
{who} {must} {verb} {what} {where}.
{who} {past} {what}, {link} {who} {went} {where}.
{who} {past} {what} {link} {who} {past} {what}.
{when}, {who} {past} {what} {where}.
{single} is {doing} {what}.
{single} was {doing} {what} {where}.
{single} {goes} {where} {when}.
{single} {goes} {adv}.
{single} is {adj} and {adj}.
{single} was very {adj} {when}.
{single} is too {adj} for {what}.
{single} has been {doing} {what} {when}.
{single} does not {verb} {what}.
{single} is as {adj} as {what}.
{single} is not {adj}, but {adj}.
{single} said that {what} is {adj}.
{single} told me that {who} {past} {what}.
I think that {who} {must} {verb} {what}.
I hope that {who} {past} {what}.
I am {doing} {what} {when}.
We are {doing} {what} {where}.
They are not {adj}, they are {adj}.
We have {past} {what}.
You have never {past} {what}.
I have {count} {thing}s and {count} {animal}s.
There is a {adj} {thing} {where}.
There are {count} {people} {where}.
There was a {adj} {animal} {where}.
There were no {people} {where}.
There is nothing {adj} about {idea}.
It is {adj} to {verb} {what}.
It was {adj} to {verb} {what} {where}.
It is {adj} {where} {when}.
It is {number} degrees {where}.
It costs {number} dollars.
It takes {count} hours to {verb} {what}.
This is {what}.
That is {adj}.
These {people} are {adj}.
Those {people} {went} {where}.
Here is {what}.
{idea} is {adj}.
{idea} is more {adj} than {idea}.
{idea} and {idea} are {adj}.
{idea} makes {people} {adj}.
{idea} will change {idea}.
{idea} is the key to {idea}.
Without {idea} there is no {idea}.
Many {people} know little about {idea}.
Most {people} are interested in {idea}.
We learn {idea} from {idea}.
The {tech} is {adj}.
The {tech} of the {tech} is {adj}.
The {tech} must {verb} the {tech}.
The {tech} can {verb} {what} {adv}.
Every {tech} has a {adj} {tech}.
A {tech} {goes} {where}.
A {adj} {tech} learns from {idea}.
The {tech} was trained on {idea}.
This {tech} runs on a {adj} {tech}.
Please restart the {tech} and check the {tech}.
Our {tech} answers {number} questions every {day}.
{tech}s and {tech}s are changing {idea}.
The model says what you write.
The {acronym} is {adj} {when}.
The {acronym} {tech} can {verb} {what}.
What is {acronym} {tech}?
{acronym} and {acronym} are {adj}.
{who} {past} the {acronym} {where}.
My {job} works for the {acronym} in {city}.
Most {people} {must} {verb} an {acronym}.
The {color} {animal} and the {adj} {animal} are friends.
The {adj} {color} {animal} {went} {where}.
The {job} and the {job} {past} {what}.
The {job} of the {place} {past} {what}.
The {thing} is {where}.
The {thing} of my {job} is {adj}.
The {thing} that {who} {past} is {adj}.
The {place} is {adj} {when}.
The way to the {place} is {adj}.
The meeting is on {day} at {clock}.
The train to {city} leaves at {clock}.
The flight from {city} to {city} takes {count} hours.
The capital of {country} is {adj}.
The {people} of {country} speak {tongue}.
The weather in {city} is {adj} {when}.
The answer is {number}.
The number is {number}.
Page {number}, line {number}.
{number} and {number} is {number}.
{number}, {number}, {number}.
My name is {person}, and I live in {city}.
My {job} {past} {what} {when}.
My birthday is in {month}.
My favorite {thing} is {adj}.
I was born in {month}, {person} in {month}.
I speak {tongue} and a little {tongue}.
I would like {what}, please.
I would rather {verb} {what} than {verb} {what}.
I don't like {food}.
I like {food}, {food}, and {food}.
I'm {adj}, and you're {adj}.
I've {past} {what}, but I haven't {past} {what}.
I'll {verb} {what} {when}.
You're {adj}, aren't you?
It's a {adj} day, isn't it?
It isn't {adj}, it's {adj}.
They're {where}.
We're {doing} {what}.
He's {doing} {what} {where}.
She's a {adj} {job}.
That's a {adj} {thing}!
What's {where}?
Let's {verb} {what}.
Don't {verb} {what}!
{verb} {what}.
Please {verb} {what}.
Please {verb} {what} {when}.
{verb} {what}, and then {verb} {what}.
Never {verb} {what} {when}.
Always {verb} {what} {where}.
Can you {verb} {what}?
Can you {verb} {what} for me?
Could you please {verb} {what}?
Will {who} {verb} {what} {when}?
Would you like some {food}?
Do you {verb} {what}?
Do you speak {tongue}?
Does your {job} {verb} {what}?
Did {who} {verb} {what}?
Have you ever {past} {what}?
Are you {adj}?
Are you {doing} {what}?
Is it {adj} to {verb} {what}?
Is there {what} {where}?
Is {idea} {adj}?
Was the {thing} {adj}?
Where is {what}?
Where did {who} {verb} {what}?
Where do you live, {person}?
Who {past} {what}?
Who is {where}?
Who is the {adj} {job}?
What is {idea}?
What is {where}?
What is the name of the {adj} {job}?
What do you know about {idea}?
What time is it?
What color is the {thing}?
Which {thing} is {adj}?
Whose {thing} is this?
Why did {who} {verb} {what}?
Why is the {tech} {adj}?
When will {who} {verb} {what}?
How {adj} is {what}?
How many {people} are {where}?
How much is {what}?
How old is the {place}?
How do {people} {verb} {what}?
How does a {tech} {verb} {what}?
How long did {who} {verb} {what}?
If you {verb} {what}, then I will {verb} {what}.
If {who} {past} {what}, {who} must be {adj}.
When {who} {went} {where}, {who} {past} {what}.
While {who} was {doing} {what}, {who} {went} {where}.
Although {single} was {adj}, {who} {past} {what}.
As soon as {who} {went}, we {past} {what}.
Both the {job} and the {job} {went} {where}.
Neither the {thing} nor the {thing} was {adj}.
Either {verb} {what} or {verb} {what}.
Once upon a time there was a {adj} {animal}, and it {went} {where}.
Nobody can {verb} a {adj} {animal}.
Some {people} {verb} {what}, others {verb} {what}.
In {country}, {people} {verb} {what} {when}.
In {month} {who} {went} to {country}.
On {day} {who} must {verb} {what}.
At {clock} {who} {past} {what}.
According to the {job}, {idea} is {adj}.
For example, {who} {must} {verb} {what}.
However, {single} was {adj}.
First {who} {past} {what}, then {who} {went} {where}.
{who} said, {greeting}, and {went} {where}.
{greeting}, {person}.
{greeting}, {person}!
{greeting}, {greeting}.
{greeting}, my {adj} friend.
{greeting}, I am {adj}.
{greeting}, {who} {past} {what}.
{person}, {greeting}.
{person}, can you {verb} {what}?
{person} and {person} {went} {where} {when}.
{greeting}, I am a {animal}, and I {must} {verb} {what}.
{animal}s and {animal}s {verb} {food}.
{thing}s, {thing}s, and {thing}s.
{adj}, {adj}, and {adj}.
{color} and {color}.
The {adj} one, please.
Not {where}, but {where}.
A {adj} {thing}.
{what} {where}.
{who} {went}.
So {adj}!
How {adj}!
What a {adj} {thing}!
Very {adj}, {greeting}.
{person} {goes} {when}.
"""
)

_NUMBER_LIMITS = (21, 100, 1000, 10_000, 100_000)


def sentence(rng: random.Random) -> str:
    """One sentence of a random template, first letter upper case."""
    return capitalised(fill(rng.choice(SENTENCES), rng))


def greeting(rng: random.Random) -> str:
    """A short utterance: one or two set phrases."""
    phrase = rng.choice(SLOTS["greeting"])
    mark = "?" if phrase.split()[0] in {"how", "what", "why", "who", "where", "are", "is"} else "."
    return capitalised(phrase) + (rng.choice(".!,") if mark == "." else mark)


def fill(template: str, rng: random.Random) -> str:
    """The template with every slot filled, innermost last."""
    while (slot := _SLOT.search(template)) is not None:
        name = slot[1]
        if name in {"number", "count"}:
            limit = 13 if name == "count" else rng.choice(_NUMBER_LIMITS)
            filling = in_words(rng.randrange(2 if name == "count" else 0, limit))
        else:
            filling = rng.choice(SLOTS[name])
        template = template[: slot.start()] + filling + template[slot.end() :]
    return re.sub(r"\ba (?=[aeio])", "an ", template)


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
