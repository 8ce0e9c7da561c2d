"""APIs of other vendors over chat engines: each is translated into a chat completion, and the chat's answer back."""
