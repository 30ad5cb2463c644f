"""Sessions, chats and oracles over any context."""

from slm_core.chat.chat import Chat, ChatOptions
from slm_core.chat.chatstream import ChatStream
from slm_core.chat.marks import Mark
from slm_core.chat.oracle import Choice, Extraction, Oracle
from slm_core.chat.prompt import encode_segments
from slm_core.chat.session import Session

__all__ = ["Chat", "ChatOptions", "ChatStream", "Choice", "Extraction", "Mark", "Oracle", "Session", "encode_segments"]
