"""Binaryen, as far as it is needed: the shared library of the package icpp-binaryen through cffi.

The library ends its process when a module is not to its taste (so does a bug of it), and keeps settings in globals: use
it in a child (`agentrt.capture.child`), for one module.
"""

import importlib.metadata
import importlib.util
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import cffi

from agentrt.errors import EngineError, ModuleError

# From binaryen-c.h of version 116 and later. A literal is passed by value: a type and 16 bytes, whatever they are.
_DECLARATIONS: Final = """
typedef struct BinaryenModule *BinaryenModuleRef;
typedef struct BinaryenExpression *BinaryenExpressionRef;
typedef uintptr_t BinaryenType;
struct BinaryenLiteral { uintptr_t type; uint64_t low, high; };
typedef struct { void *binary; size_t bytes; char *source_map; } Written;
BinaryenType BinaryenTypeNone(void);
BinaryenType BinaryenTypeInt32(void);
BinaryenModuleRef BinaryenModuleRead(char *input, size_t size);
void BinaryenModuleDispose(BinaryenModuleRef);
bool BinaryenModuleValidate(BinaryenModuleRef);
void BinaryenModuleRunPasses(BinaryenModuleRef, const char **passes, uint32_t count);
Written BinaryenModuleAllocateAndWrite(BinaryenModuleRef, const char *source_map_url);
uint32_t BinaryenModuleGetFeatures(BinaryenModuleRef);
void BinaryenModuleSetFeatures(BinaryenModuleRef, uint32_t);
uint32_t BinaryenFeatureMutableGlobals(void);
uint32_t BinaryenFeatureNontrappingFPToInt(void);
uint32_t BinaryenFeatureSIMD128(void);
uint32_t BinaryenFeatureBulkMemory(void);
uint32_t BinaryenFeatureSignExt(void);
uint32_t BinaryenFeatureReferenceTypes(void);
uint32_t BinaryenFeatureMultivalue(void);
uint32_t BinaryenFeatureExtendedConst(void);
uint32_t BinaryenFeatureRelaxedSIMD(void);
void BinaryenSetPassArgument(const char *name, const char *value);
void BinaryenSetOptimizeLevel(int);
void BinaryenSetShrinkLevel(int);
void BinaryenSetDebugInfo(bool);
uint32_t BinaryenGetNumFunctions(BinaryenModuleRef);
struct BinaryenFunction *BinaryenGetFunctionByIndex(BinaryenModuleRef, uint32_t);
const char *BinaryenFunctionGetName(struct BinaryenFunction *);
uint32_t BinaryenGetNumGlobals(BinaryenModuleRef);
struct BinaryenGlobal *BinaryenGetGlobalByIndex(BinaryenModuleRef, uint32_t);
const char *BinaryenGlobalGetName(struct BinaryenGlobal *);
bool BinaryenGlobalIsMutable(struct BinaryenGlobal *);
void *BinaryenGetExport(BinaryenModuleRef, const char *name);
void *BinaryenAddGlobalExport(BinaryenModuleRef, const char *internal, const char *external);
void *BinaryenAddFunctionExport(BinaryenModuleRef, const char *internal, const char *external);
void *BinaryenAddGlobal(BinaryenModuleRef, const char *, BinaryenType, bool, BinaryenExpressionRef);
void *BinaryenAddFunction(BinaryenModuleRef, const char *, BinaryenType, BinaryenType, BinaryenType *, uint32_t,
                          BinaryenExpressionRef);
void BinaryenAddFunctionImport(BinaryenModuleRef, const char *internal, const char *module, const char *base,
                               BinaryenType, BinaryenType);
BinaryenExpressionRef BinaryenConst(BinaryenModuleRef, struct BinaryenLiteral);
BinaryenExpressionRef BinaryenIf(BinaryenModuleRef, BinaryenExpressionRef, BinaryenExpressionRef,
                                 BinaryenExpressionRef);
BinaryenExpressionRef BinaryenGlobalGet(BinaryenModuleRef, const char *, BinaryenType);
BinaryenExpressionRef BinaryenCall(BinaryenModuleRef, const char *, BinaryenExpressionRef *, uint32_t, BinaryenType);
"""

_PACKAGE: Final = "icpp_binaryen"

#: What modules may use whether they have a section that says so or not: all of it is on in the engine.
_FEATURES: Final = (
    *("MutableGlobals", "NontrappingFPToInt", "SIMD128", "BulkMemory", "SignExt", "ReferenceTypes", "Multivalue"),
    *("ExtendedConst", "RelaxedSIMD"),
)


def library() -> Path:
    """Where the library is. Raises EngineError if it is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    folder = None if spec is None or not spec.submodule_search_locations else spec.submodule_search_locations[0]
    path = None if folder is None else Path(folder) / "lib" / "libbinaryen.so"
    if path is None or not path.exists():
        raise EngineError("Binaryen is not installed", hint="pip install 'agentrt[capture]'")
    return path


def version() -> str:
    """Of the package; it is that of Binaryen. Raises EngineError if it is not installed."""
    try:
        return importlib.metadata.version("icpp-binaryen")
    except importlib.metadata.PackageNotFoundError:
        raise EngineError("Binaryen is not installed", hint="pip install 'agentrt[capture]'") from None


class Module:
    """A module in Binaryen's hands."""

    def __init__(self, wasm: bytes) -> None:
        """Raises EngineError if there is no library, ModuleError if it cannot read the module."""
        self._ffi = cffi.FFI()
        self._ffi.cdef(_DECLARATIONS)
        self._lib: Any = self._ffi.dlopen(str(library()))
        self._input = self._ffi.new("char[]", wasm)  # which the module borrows
        self._module = self._lib.BinaryenModuleRead(self._input, len(wasm))
        if self._module == self._ffi.NULL:
            raise ModuleError("Binaryen cannot read the module")
        features = self._lib.BinaryenModuleGetFeatures(self._module)
        for name in _FEATURES:
            features |= getattr(self._lib, f"BinaryenFeature{name}")()
        self._lib.BinaryenModuleSetFeatures(self._module, features)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lib.BinaryenModuleDispose(self._module)

    def run(self, *passes: str, optimize: int = 0, **arguments: str) -> None:
        """Run passes by name; ``arguments`` with their dashes as underscores."""
        self._lib.BinaryenSetOptimizeLevel(optimize)
        self._lib.BinaryenSetShrinkLevel(0)
        for name, value in arguments.items():
            self._lib.BinaryenSetPassArgument(name.replace("_", "-").encode(), value.encode())
        names = [self._ffi.new("char[]", name.encode()) for name in passes]
        self._lib.BinaryenModuleRunPasses(self._module, self._ffi.new("const char *[]", names), len(names))

    def mutable_globals(self) -> list[str]:
        """Names inside the module, in its order."""
        found = []
        for index in range(self._lib.BinaryenGetNumGlobals(self._module)):
            each = self._lib.BinaryenGetGlobalByIndex(self._module, index)
            if self._lib.BinaryenGlobalIsMutable(each):
                found.append(self._ffi.string(self._lib.BinaryenGlobalGetName(each)).decode())
        return found

    def functions(self) -> list[str]:
        """Names inside the module of all functions, in its order."""
        lib, found = self._lib, []
        for index in range(lib.BinaryenGetNumFunctions(self._module)):
            each = lib.BinaryenGetFunctionByIndex(self._module, index)
            found.append(self._ffi.string(lib.BinaryenFunctionGetName(each)).decode())
        return found

    def exports(self, name: str) -> bool:
        """Whether it exports something of that name."""
        return bool(self._lib.BinaryenGetExport(self._module, name.encode()) != self._ffi.NULL)

    def export_global(self, internal: str, external: str) -> None:
        """Export a global."""
        self._lib.BinaryenAddGlobalExport(self._module, internal.encode(), external.encode())

    def add_check(self, *, export: str, flag: str, module: str, base: str) -> None:
        """Export a function that calls an import of type () -> () when a new global, exported as ``flag``, is not 0."""
        lib, none, i32 = self._lib, self._lib.BinaryenTypeNone(), self._lib.BinaryenTypeInt32()
        imported, internal, global_name = (f"agentrt:{name}".encode() for name in ("import", "check", "flag"))
        zero = lib.BinaryenConst(self._module, self._ffi.new("struct BinaryenLiteral *", {"type": i32})[0])
        lib.BinaryenAddFunctionImport(self._module, imported, module.encode(), base.encode(), none, none)
        lib.BinaryenAddGlobal(self._module, global_name, i32, True, zero)
        asked = lib.BinaryenGlobalGet(self._module, global_name, i32)
        call = lib.BinaryenCall(self._module, imported, self._ffi.NULL, 0, none)
        body = lib.BinaryenIf(self._module, asked, call, self._ffi.NULL)
        lib.BinaryenAddFunction(self._module, internal, none, none, self._ffi.NULL, 0, body)
        lib.BinaryenAddFunctionExport(self._module, internal, export.encode())
        self.export_global(global_name.decode(), flag)

    def write(self) -> bytes:
        """The module, valid, with the names of its functions."""
        if not self._lib.BinaryenModuleValidate(self._module):
            raise ModuleError("Binaryen made an invalid module of it")
        self._lib.BinaryenSetDebugInfo(True)
        written = self._lib.BinaryenModuleAllocateAndWrite(self._module, self._ffi.NULL)
        return bytes(self._ffi.buffer(written.binary, written.bytes))  # freed with the process
