"""The tables of the ``[models]`` section: providers, models, profiles and routes.

What a table says of another one (a profile names models, a model its provider) is checked in `catalog`, once.
"""

from typing import Annotated, Final

from agentrt.settings import GIB, KIB, MIB, Section, setting

#: Dearer than anything that is sold; keeps products of tokens and prices within 64 bits.
_PRICE_MAX: Final = 10**10
_TOKENS_MAX: Final = 100_000_000
_MS_MAX: Final = 86_400_000

Names = tuple[str, ...]


class ProviderConfig(Section, frozen=True, kw_only=True):
    """`[models.providers.NAME]`: where models are to be had."""

    kind: Annotated[
        str, setting("Who speaks to it: `openai` (the OpenAI-compatible HTTP protocol), or what a plugin brings.")
    ] = "openai"
    base_url: Annotated[
        str, setting("Where its API begins, such as `https://api.openai.com/v1`. `http` only for this machine.", "URL")
    ] = ""
    allow_plain: Annotated[
        bool, setting("Allow `http` to other machines: keys and prompts can then be read on the way.")
    ] = False
    api_key: Annotated[
        str,
        setting(
            "`secret://NAME`: the secret that is sent as bearer token. Empty: none is sent. The key itself is refused: "
            "files are copied and shown.",
        ),
    ] = ""
    tenant_keys: Annotated[
        bool,
        setting("Take the secret from the tenant whose run asks, not from the node's own."),
    ] = False
    connections_max: Annotated[int, setting("Connections to it, each with one call.", "connections", 1, 10_000)] = 128
    connect_timeout_ms: Annotated[int, setting("For a connection, with TLS.", "ms", 10, _MS_MAX)] = 10_000
    idle_timeout_ms: Annotated[
        int,
        setting(
            "Without a byte of an answer, the first one included; then the call has failed and its connection is "
            "closed.",
            "ms",
            10,
            _MS_MAX,
        ),
    ] = 180_000
    total_timeout_ms: Annotated[int, setting("For a whole call.", "ms", 10, _MS_MAX)] = 600_000
    answer_bytes_max: Annotated[
        int, setting("An answer as it comes over the wire; a longer one is cut off and fails.", "bytes", KIB, GIB)
    ] = 16 * MIB
    retry_after_max_ms: Annotated[int, setting("The longest that its `Retry-After` is believed.", "ms", 0, _MS_MAX)] = (
        60_000
    )


class ModelConfig(Section, frozen=True, kw_only=True):
    """`[models.catalog.NAME]`: a model of a provider, what it can and what it costs."""

    provider: Annotated[str, setting("The provider that has it.")] = ""
    model: Annotated[str, setting("What the provider calls it. Empty: NAME.")] = ""
    context_tokens: Annotated[int, setting("Input and output together.", "tokens", 1, _TOKENS_MAX)] = 128_000
    output_tokens_max: Annotated[int, setting("The longest output.", "tokens", 1, _TOKENS_MAX)] = 16_384
    structured: Annotated[bool, setting("It keeps to a JSON schema when asked to.")] = False
    tools: Annotated[bool, setting("It can ask for tools.")] = False
    stream: Annotated[
        bool, setting("Its answers come as a stream. Without, a call cannot be cut when it passes its bounds.")
    ] = True
    usage_in_stream: Annotated[
        bool, setting("Ask for the tokens used at a stream's end; some servers refuse the question.")
    ] = True
    latency_ms: Annotated[int, setting("Typical time of a call. 0: not known.", "ms", 0, _MS_MAX)] = 0
    quality: Annotated[int, setting("How good it is, by your own measure.", "", 0, 100)] = 50
    write_risk: Annotated[
        int,
        setting("The riskiest effects that it may decide: 0 none, 1 reversible, 2 costly, 3 irreversible.", "", 0, 3),
    ] = 1
    safety: Annotated[str, setting("The safety policy that it is under, a label of yours.")] = ""
    region: Annotated[str, setting("Where it computes, a label of yours such as `eu`.")] = ""
    data_policy: Annotated[str, setting("What happens to what is sent, a label of yours such as `no_retention`.")] = ""
    input_price: Annotated[
        int, setting("Input tokens; $0.15 are 150,000.", "micro-dollars per million tokens", 0, _PRICE_MAX)
    ] = 0
    cached_price: Annotated[
        int,
        setting(
            "Input tokens that the provider had cached. -1: as others.",
            "micro-dollars per million tokens",
            -1,
            _PRICE_MAX,
        ),
    ] = -1
    output_price: Annotated[
        int,
        setting("Output tokens, those of hidden thoughts included.", "micro-dollars per million tokens", 0, _PRICE_MAX),
    ] = 0
    token_bytes: Annotated[
        int,
        setting(
            "Bytes of input that make a token, for the estimate before a call. 1 can never be too few tokens; English "
            "text has 4.",
            "bytes",
            1,
            16,
        ),
    ] = 1


class ProfileConfig(Section, frozen=True, kw_only=True):
    """`[models.profiles.NAME]`: what agents ask for. Its first model that meets all needs answers; if that fails, the
    next one that does."""

    models: Annotated[Names, setting("Models of the catalog, the best first.")] = ()
    order: Annotated[str, setting("`listed`: as above; `cheapest`: by what this call is estimated to cost.")] = "listed"
    tenants: Annotated[Names, setting("Who may use it. Empty: everybody.")] = ()
    tier: Annotated[
        int,
        setting("Tier of its calls, if it is lower than the run's: 2 is the batch queue. -1: the run's.", "", -1, 3),
    ] = -1
    output_tokens_max: Annotated[
        int, setting("The longest output, unless the call asks for less.", "tokens", 1, _TOKENS_MAX)
    ] = 4_096
    context: Annotated[
        str,
        setting("Strategy by which a conversation that is too long is shortened, such as `recent@1`. Empty: it fails."),
    ] = ""
    structured: Annotated[bool, setting("Needs a model that keeps to schemas, even for calls without one.")] = False
    tools: Annotated[bool, setting("Needs a model that can ask for tools, even for calls without.")] = False
    context_tokens_min: Annotated[int, setting("Needs a context window so large.", "tokens", 0, _TOKENS_MAX)] = 0
    latency_ms_max: Annotated[int, setting("Needs a model known to be so fast. 0: any.", "ms", 0, _MS_MAX)] = 0
    quality_min: Annotated[int, setting("Needs this quality.", "", 0, 100)] = 0
    write_risk: Annotated[int, setting("Needs a model that may decide effects so risky.", "", 0, 3)] = 0
    safety: Annotated[Names, setting("Needs one of these safety policies. Empty: any.")] = ()
    regions: Annotated[Names, setting("Needs one of these regions. Empty: any.")] = ()
    data_policies: Annotated[Names, setting("Needs one of these data policies. Empty: any.")] = ()


class RouteConfig(Section, frozen=True, kw_only=True):
    """`[models.routes.NAME]`: calls that go to another profile. The first route that fits, in the order of their names,
    decides; routes are not followed further."""

    profile: Annotated[str, setting("The profile that was asked for. Empty: any.")] = ""
    task: Annotated[str, setting("The call's task class. Empty: any.")] = ""
    tenants: Annotated[Names, setting("Whose calls. Empty: everybody's.")] = ()
    cost_micro_usd_min: Annotated[
        int, setting("What the call is estimated to cost at least.", "micro-dollars", 0, 10**15)
    ] = 0
    use: Annotated[str, setting("The profile that answers.")] = ""
