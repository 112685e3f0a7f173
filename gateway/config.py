"""Configuration of the gateway: one frozen object, composed, read once at the top."""

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ListenConfig:
    """Where the gateway listens."""

    host: str = "127.0.0.1"
    port: int = 8765
    """0: a free port that the system picks."""
    tcp: bool = True
    """False: only the Unix socket."""
    tls_cert: str | None = None
    """A PEM file with the certificate and its chain; TCP speaks TLS then."""
    tls_key: str | None = None
    """A PEM file with its key; None: it is in the certificate's file."""
    unix_path: str | None = None
    """A Unix socket to listen on as well, for this user's programs only."""


@dataclass(frozen=True)
class LimitsConfig:
    """Bounds of one connection, and of their number."""

    max_connections: int = 16_384
    """Connections that may be open, of all kinds."""
    max_connections_per_address: int = 1024
    """The same from one address. A proxy in front has one address for all."""
    max_frame_bytes: int = 8 << 20
    """A longer message from a client closes its connection with 1009."""
    max_in_flight_per_connection: int = 256
    """Requests of one connection that may run or wait at a time."""
    max_bad_frames: int = 16
    """Bad frames in a row after which the connection is closed with 4400: broken ones, and ids in use."""
    max_buffered_bytes: int = 8 << 20
    """Unsent bytes past which a connection that does not read fast enough is dropped with 4508."""
    write_buffer_bytes: int = 64 << 10
    """Bytes handed to the system ahead of the client; past it deltas merge instead."""
    socket_send_buffer_bytes: int | None = 256 << 10
    """The system's own buffer for each connection (SO_SNDBUF): what it has taken merges no more, and a ping
    waits behind it. None: the system decides, up to megabytes."""
    max_unread_frames: int = 64
    """Messages from a client that wait for the reader; past it the socket is not read."""


@dataclass(frozen=True)
class ResumeConfig:
    """How long and how much of streams with `detach` is kept."""

    detach_timeout_s: float = 60.0
    """A stream goes on so long without a connection; then it is cancelled."""
    replay_s: float = 120.0
    """Sent frames are kept so long, and all that is kept of a stream so long after its end.

    Longer than it takes to notice a lost connection (two pings) and to come back."""
    replay_bytes: int = 512 << 10
    """Sent frames of one stream that are kept; the oldest go first. So much may also wait while detached."""
    max_streams_per_token: int = 1024
    """Streams of one access token that are kept, ended ones included; those that ended first go first.

    Without tokens, those of all clients."""


@dataclass(frozen=True)
class DeadlinesConfig:
    """How long the gateway waits, for everything it waits for."""

    open_timeout_s: float = 10.0
    """For a connection's opening handshake."""
    stall_timeout_s: float = 30.0
    """Without a byte of progress while bytes wait; then the connection is aborted."""
    ping_interval_s: float = 20.0
    ping_timeout_s: float = 20.0
    close_timeout_s: float = 2.0
    """For the closing handshake of one connection, what is buffered included."""
    drain_timeout_s: float = 30.0
    """For running requests once the gateway is told to stop; then they are cancelled."""
    cancel_timeout_s: float = 0.4
    """For the engines to let cancelled requests go while the gateway stops."""
    goodbye_timeout_s: float = 0.3
    """For all closing handshakes together while the gateway stops."""


@dataclass(frozen=True)
class TokenConfig:
    """A token that clients may show: its digest only, so that no secret can end in a log."""

    name: str
    """Its holder: what the prompt cache and streams are kept apart by."""
    sha256: bytes = field(default=b"", repr=False)
    max_in_flight: int | None = None
    """Requests of all its connections that may run or wait; None: no limit of its own."""
    max_connections: int | None = None

    @classmethod
    def of_secret(cls, name: str, secret: str) -> "TokenConfig":
        """Return the entry of a token that is known in clear."""
        return cls(name, hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest())


@dataclass(frozen=True)
class AccessConfig:
    """Who may talk to the gateway. Hosts and origins: on top of the gateway's own; `*` allows any."""

    allowed_origins: tuple[str, ...] = ()
    """Such as `https://chat.example.org`, as a browser sends it in `Origin`."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that clients may use in `Host`, without a port."""
    tokens: tuple[TokenConfig, ...] = ()
    """The bearer tokens of which clients must show one; none: no token is asked for."""


@dataclass(frozen=True)
class GatewayConfig:
    """The whole configuration of a gateway."""

    listen: ListenConfig = field(default_factory=ListenConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
