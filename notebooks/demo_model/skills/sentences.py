"""Phrasings of the extraction skill, one per line. They are used in training and never in the evaluation."""

from __future__ import annotations

FORMS = {
    "person": """
The woman from {city} is named {name} and turned {age} last week.
At the age of {age}, {name} moved to {city}.
{name}, who lives in {city}, is {age}.
Who is {name}? Someone of {age} from {city}.
Name: {name}. Age: {age}. Town: {city}.
Age {age}, name {name}, town {city}.
We spoke with {name} in {city}; {name} is {age} now.
Our neighbour {name} is {age} and grew up in {city}.
{city} is where {name} was found at {age}.
"How old are you, {name}?" "I am {age}, and my home is {city}."
I met {name} in {city}, a person of {age} years.
My friend {name} has a flat in {city} and turns {age} today.
There is someone in {city} who is {age} and is called {name}.
Being {age} years old, {name} still walks through {city} every day.
{age} years ago {name} was born in {city}.
Hello, {name} here, {age} years old, writing from {city}.
Since {name} is {age}, the move to {city} was hard.
Do you know {name}? {age} years old, a flat in {city}.
The guest ({age}) came from {city}; the name was {name}.
The name is {name}, the age is {age}, the town is {city}.
Say hello to {name} in {city}, who turned {age}.
She is {age}, her name is {name} and her house stands in {city}.
In {city} they call me {name}; I am {age}.
My age is {age}, my town {city}, my name {name}.
{name} stays in {city} and will be {age} soon.
{name} has reached the age of {age} and does not leave {city}.
The passport says {name}, {city}, {age} years.
My brother is called {name}, he is {age} and he has a house in {city}.
I live in {city} and I am {age}; people know me as {name}.
I have lived in {city} all my {age} years, and I am {name}.
""",
    "worker": """
If you are in {city}, look for {name}, who is a {job}.
The people of {city} need a {job}, and {name} is one.
As a {job}, {name} moved to {city}.
{name} became a {job} and stayed in {city}.
My friend {name}, a {job}, has a house in {city}.
Who is the {job} of {city}? It is {name}.
Name: {name}, job: {job}, town: {city}.
Job {job}, town {city}, name {name}.
"What do you do, {name}?" "I am a {job} in {city}."
There is a {job} in {city} whose name is {name}.
{city} has a new {job}: {name}.
{name} earns money as a {job} and has a flat in {city}.
{name}, who comes from {city}, found work as a {job}.
My neighbour in {city} is a {job}; the name is {name}.
We called {name}, since a {job} was needed in {city}.
The best {job} I know is {name} in {city}.
{name} learned to be a {job} in {city}.
Working as a {job} in {city} is what {name} likes.
{name} stays in {city} and has the job of a {job}.
Our {job} is called {name} and comes from {city}.
She is {name}, she lives in {city}, she works as a {job}.
He is a {job}, his name is {name}, his town is {city}.
I am {name}, I live in {city} and I am a {job}.
Write to {name} ({job}, {city}).
A {job} was wanted in {city}, so {name} went.
The house of {name} is in {city}, the job is {job}.
For years {name} has been a {job} in {city}.
A {job} named {name} came to us from {city}.
In {city} there works a {job} with the name {name}.
""",
    "order": """
Could you send me {quantity} {item}? I can pay {price} euros.
The {quantity} {item} were sold for {price} euros.
For {price} euros they sold us {quantity} {item}.
How much are {quantity} {item}? They are {price} euros.
Item: {item}, quantity: {quantity}, price: {price} euros.
Price {price} euros, item {item}, quantity {quantity}.
I took {quantity} {item} and gave {price} euros.
{price} euros were paid for {quantity} {item}.
With {price} euros you can buy {quantity} {item}.
"I want {quantity} {item}." "That makes {price} euros."
My bill says {price} euros because of {quantity} {item}.
The shop has {quantity} {item}, all together {price} euros.
The price of {quantity} {item} was {price} euros.
We got {quantity} {item}, which cost us {price} euros.
Paul wants {quantity} {item} and has {price} euros.
There are {quantity} {item} in the box and the price is {price} euros.
I sold {quantity} {item} yesterday and got {price} euros.
They ask {price} euros for all {quantity} {item}.
{quantity} of the {item}, please; here are {price} euros.
Bring me {quantity} {item} from the market, it will be {price} euros.
You owe me {price} euros since I bought you {quantity} {item}.
A box of {quantity} {item} is {price} euros.
He ordered {quantity} {item}; the bill was {price} euros.
The total is {price} euros, the goods are {quantity} {item}.
They spent {price} euros on {quantity} {item}.
I need {item}, {quantity} of them, and offer {price} euros.
Send us the {quantity} {item} today, we paid {price} euros.
She gave {price} euros and took {quantity} {item} home.
My mother paid {price} euros when she bought {quantity} {item}.
""",
    "meeting": """
Can {person} come on {day} at {hour} o'clock?
Please tell {person} to be here at {hour} on {day}.
We wait for {person} on {day}, it starts at {hour}.
{day} at {hour}: call {person}.
{hour} o'clock on {day} is fine for {person}.
With {person} I agreed on {day}, {hour} o'clock.
Person: {person}, day: {day}, hour: {hour}.
Hour {hour}, day {day}, person {person}.
Lunch with {person} is planned for {day} at {hour} o'clock.
"When do we meet, {person}?" "On {day} at {hour}."
The talk starts at {hour} on {day}, and {person} will speak.
I see {person} at {hour} o'clock this {day}.
{person} will be in the office on {day} from {hour} o'clock.
It is {day}, and at {hour} {person} is expected.
Do not forget {person}: {day}, {hour} o'clock.
You will find {person} here at {hour} o'clock on {day}.
Next {day} {person} has a call at {hour}.
At {hour} o'clock {person} arrives, and the day is {day}.
The visit of {person} was moved to {day} at {hour}.
I have to call {person} at {hour} o'clock on {day}.
{person} would like to see you on {day} at {hour} o'clock.
We have an appointment on {day} at {hour}; ask for {person}.
{day} is good for {person}, at {hour} o'clock.
I wrote {person} that {hour} on {day} is too late.
On {day} there is a lesson with {person}, it begins at {hour} o'clock.
She has time for {person} at {hour} on {day}.
{person} asked to meet on {day} when it is {hour} o'clock.
At {hour}, on {day}, there will be coffee with {person}.
""",
    "pet": """
There is a {colour} {animal} at the house of {owner}; they call it {name}.
{owner} and the {colour} {animal} {name} are friends.
The owner of the {colour} {animal} {name} is {owner}.
{owner} calls the {colour} {animal} {name}.
Who owns the {animal} {name}, which is {colour}? It is {owner}.
Owner: {owner}, animal: {animal}, name: {name}, colour: {colour}.
Animal {animal}, colour {colour}, name {name}, owner {owner}.
{name} is a {animal}. It is {colour} and belongs to {owner}.
The {animal} of {owner} is {colour} and its name is {name}.
"Is that {name}, {owner}?" "Yes, my {colour} {animal}."
My {animal} {name} is {colour}, and I am {owner}.
I am {owner} and my {colour} {animal} is named {name}.
{owner} feeds {name}, the {colour} {animal}, every day.
Have you seen {name}? It is the {colour} {animal} of {owner}.
A {colour} {animal} with the name {name} was given to {owner}.
{name}, who is a {colour} {animal}, was found by {owner}.
{owner} lost a {animal}: {colour}, the name is {name}.
{colour} is the colour of {name}, the {animal} that {owner} has.
We visited {owner} and played with {name}, a {animal} that is {colour}.
At home {owner} keeps {name}, a {colour} {animal}.
The {colour} {animal} ran away; {owner} called {name} again and again.
{owner}'s {animal} is {colour} and is called {name}.
{owner}'s {colour} {animal} has the name {name}.
In the garden of {owner} lives a {animal}, {colour}, with the name {name}.
{name} sleeps at the feet of {owner}. It is a {colour} {animal}.
A {animal} called {name}, {colour} as can be, follows {owner}.
{owner} got a {colour} {animal} for the birthday and named it {name}.
{name} the {animal} is {colour}; {owner} takes care of it.
""",
    "flight": """
Is there a bus on {day} from {from} to {to}?
From {from} you can go to {to} every {day}.
On {day} the train for {to} leaves {from}.
We leave {from} on {day} and arrive in {to}.
{to} is reached from {from} on {day}.
From: {from}, to: {to}, day: {day}.
Day {day}, from {from}, to {to}.
On {day} I am going to {to}; I start in {from}.
He drives from {from} to {to}, and it is {day}.
"Where to?" "To {to}, from {from}, on {day}."
My flight to {to} starts in {from} on {day}.
She left {from} for {to} on {day}.
The ship sails on {day}; it goes from {from} to {to}.
Starting in {from}, we reach {to} on {day}.
I need a seat to {to} on {day}; I am in {from}.
The way to {to} is long if you come from {from}, so go on {day}.
They moved from {from} to {to} last {day}.
This {day} a bus brings us from {from} to {to}.
Two tickets, please: {from} to {to}, {day}.
Reserve a seat for {day}, from {from} to {to}.
Next {day} {to} will be my goal, and {from} my start.
You start from {from} and end in {to} on {day}.
The parcel was sent from {from} on {day} and goes to {to}.
How do I get to {to} from {from} on {day}?
I come from {from} and want to be in {to} by {day}.
The train to {to} departs on {day} from {from}.
I would like to travel from {from} to {to} next {day}.
On {day} he goes by car to {to}, he comes from {from}.
""",
    "book": """
Who wrote {title}? It was {author}, in {year}.
In {year} a book came out: {title}, written by {author}.
The year is {year}, the title {title}, the author {author}.
Title: {title}, author: {author}, year: {year}.
Author {author}, year {year}, title {title}.
{author} is known for {title}, which came out in {year}.
I am reading {title}, which {author} wrote in {year}.
{year} was the year in which {author} wrote {title}.
"Do you know {title}?" "Yes, {author} wrote it in {year}."
My favourite book is {title}; {author} finished it in {year}.
{title} came out in {year} and made {author} famous.
The novel {title} was published in {year}, and its writer is {author}.
Since {year} people have been reading {title} by {author}.
We bought {title}, a novel of {year}, by {author}.
There is a story by {author}, called {title}, from the year {year}.
{author}: {title}. Printed in {year}.
{title} ({year}) was made by {author}.
By {author} there is {title}, a story of {year}.
Have you read {title}? {author} published it in {year}.
It took {author} long, but in {year} {title} was ready.
The writer {author} gave us {title} in {year}.
I found an old book of {year}: it was {title} by {author}.
The prize of {year} went to {author} for {title}.
{title}, by {author}, was first printed in {year}.
In the year {year} {title} was published by {author}.
The writer of {title} is called {author}; the year was {year}.
This is {title}, and {author} wrote it in the year {year}.
""",
    "product": """
How much are the {colour} {product}? {price} euros.
The {product} are {colour} and cost {price} euros.
I paid {price} euros for {product} that are {colour}.
Product: {product}, colour: {colour}, price: {price} euros.
Price {price} euros, colour {colour}, product {product}.
{product}, {colour}, for {price} euros.
New: {colour} {product} at {price} euros.
{price} euros is what the {colour} {product} cost.
These {product} cost {price} euros and are {colour}.
"I like the {colour} {product}." "They are {price} euros."
She wants {colour} {product}, which cost {price} euros.
We have {product} in {colour}; you pay {price} euros.
If you have {price} euros, buy the {colour} {product}.
The {colour} {product} are sold for {price} euros.
Those {product} over there, the {colour} ones, are {price} euros.
Our {colour} {product} now cost only {price} euros.
With {price} euros in my pocket I bought {colour} {product}.
In the shop I saw {colour} {product} with a price of {price} euros.
The price is {price} euros, the {product} are {colour}.
For the {product} in {colour} they ask {price} euros.
He sold me {colour} {product} and I gave him {price} euros.
They offer {colour} {product}, price {price} euros.
{colour} is the colour of the {product}, {price} euros is the price.
Take the {colour} {product}, they cost just {price} euros.
You can have the {colour} {product} for {price} euros.
Our price for {product} is {price} euros if they are {colour}.
Only {price} euros: {product} in {colour}!
Price today: {price} euros, for {product} painted {colour}.
""",
    "birthday": """
When was {name} born? On {month} {day}.
{name} came into the world on {month} {day}.
Name: {name}, month: {month}, day: {day}.
Month {month}, day {day}, name {name}.
There is cake for {name} on {month} {day}.
On {month} {day} {name} gets presents.
{month} {day} is a big day for {name}.
"When is your birthday, {name}?" "On {month} {day}."
Do not forget {name}: the birthday is {month} {day}.
Write it down: {name}, {month} {day}.
The party for {name} takes place on {month} {day}.
I am {name} and my birthday is on {month} {day}.
Every year on {month} {day} we sing for {name}.
Our friend {name} turns a year older on {month} {day}.
My name is {name}; I was born on {month} {day}.
The child was born on {month} {day} and was called {name}.
It is {month} {day} and {name} is happy.
Born on {month} {day}: {name}.
In {month}, on day {day}, {name} was born.
The {day} of {month} is the birthday of {name}.
A birthday card for {name} must arrive by {month} {day}.
{name} invites us on {month} {day}.
You should call {name} on {month} {day}, it is the birthday.
{name} turns thirty on {month} {day}.
{name}, born {month} {day}, likes cake.
Today, {month} {day}, is the birthday of {name}.
{name}'s great day comes on {month} {day}.
We gave {name}'s present on {month} {day}.
""",
    "meal": """
Who wants {food}? {name}, at table {table}.
The {food} goes to {name}, who sits at table {table}.
Name: {name}, food: {food}, table: {table}.
Table {table}, food {food}, name {name}.
At table {table} sits {name} and waits for {food}.
{name} is at table {table} and would like {food}.
"{food}, please," says {name} at table {table}.
A plate of {food} is wanted at table {table} by {name}.
{name} sits at table {table}. The order is {food}.
For {name} we have {food}, it is table {table}.
The guest at table {table} is called {name} and eats {food}.
{food} was ordered by {name} at table {table}.
Cook {food} for {name}, who is at table {table}.
Table {table} is for {name}, and so is the {food}.
Give {name} the {food}; you find table {table} on the left.
I am {name}, I sit at table {table} and I want {food}.
There is no {food} at table {table} yet, and {name} is hungry.
Our guest {name} likes {food} and sits at table {table}.
{name} got {food} at table {table}.
The waiter brings {food} to table {table}, where {name} sits.
We have an order of {food} from {name}, table {table}.
More {food} for {name}, please, at table {table}.
On table {table} stands {food}, and it is for {name}.
Carry the {food} over to table {table}; {name} waits there.
{name} would like to have {food}, table {table}.
Please serve {name} some {food} at table {table}.
The person with {food} at table {table} is {name}.
Table {table} asks for {food}; the name is {name}.
""",
}
