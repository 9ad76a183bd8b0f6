"""Numbers of SPIR-V that the generator uses (from the unified specification, GLSL.std.450 and the Vulkan
environment)."""

OP = dict(
    Extension=10, ExtInstImport=11, ExtInst=12, MemoryModel=14, EntryPoint=15, ExecutionMode=16, Capability=17,
    TypeVoid=19, TypeBool=20, TypeInt=21, TypeFloat=22, TypeVector=23, TypeArray=28, TypeRuntimeArray=29, TypeStruct=30,
    TypePointer=32, TypeFunction=33, ConstantTrue=41, ConstantFalse=42, Constant=43, ConstantComposite=44, Function=54,
    FunctionEnd=56, Variable=59, Load=61, Store=62, AccessChain=65, Decorate=71, MemberDecorate=72,
    CompositeConstruct=80, CompositeExtract=81, ConvertFToU=109, ConvertFToS=110, ConvertSToF=111, ConvertUToF=112,
    UConvert=113, SConvert=114, FConvert=115, ConvertUToPtr=120, Bitcast=124, FNegate=127, IAdd=128, FAdd=129, ISub=130,
    FSub=131, IMul=132, FMul=133, UDiv=134, SDiv=135, FDiv=136, UMod=137, FRem=140, MatrixTimesScalar=143,
    LogicalEqual=164, LogicalNotEqual=165, LogicalOr=166, LogicalAnd=167, LogicalNot=168, Select=169, IEqual=170,
    INotEqual=171, UGreaterThan=172, SGreaterThan=173, UGreaterThanEqual=174, SGreaterThanEqual=175, ULessThan=176,
    SLessThan=177, ULessThanEqual=178, SLessThanEqual=179, FOrdEqual=180, FUnordNotEqual=183, FOrdLessThan=184,
    FOrdGreaterThan=186, FOrdLessThanEqual=188, FOrdGreaterThanEqual=190, ShiftRightLogical=194,
    ShiftRightArithmetic=195, ShiftLeftLogical=196, BitwiseOr=197, BitwiseXor=198, BitwiseAnd=199, Not=200,
    BitFieldInsert=201, BitFieldSExtract=202, BitFieldUExtract=203, BitCount=205, ControlBarrier=224, MemoryBarrier=225,
    AtomicIAdd=234, Phi=245, LoopMerge=246, SelectionMerge=247, Label=248, Branch=249, BranchConditional=250,
    Return=253, GroupNonUniformAny=335, GroupNonUniformBroadcast=337, GroupNonUniformBroadcastFirst=338,
    GroupNonUniformShuffle=345, GroupNonUniformShuffleXor=346, GroupNonUniformIAdd=349, GroupNonUniformFAdd=350,
    GroupNonUniformSMin=353, GroupNonUniformUMin=354, GroupNonUniformFMin=355, GroupNonUniformSMax=356,
    GroupNonUniformUMax=357, GroupNonUniformFMax=358, SDot=4450, TypeCooperativeMatrixKHR=4456,
    CooperativeMatrixLoadKHR=4457, CooperativeMatrixStoreKHR=4458, CooperativeMatrixMulAddKHR=4459,
    CooperativeMatrixLengthKHR=4460,
)  # fmt: skip

# instructions whose result has no type
UNTYPED = {
    "TypeVoid", "TypeBool", "TypeInt", "TypeFloat", "TypeVector", "TypeArray", "TypeRuntimeArray", "TypeStruct",
    "TypePointer", "TypeFunction", "TypeCooperativeMatrixKHR",
}  # fmt: skip

CAPABILITIES = dict(
    Shader=1, Float16=9, Int64=11, Int8=39, GroupNonUniform=61, GroupNonUniformVote=62, GroupNonUniformArithmetic=63,
    GroupNonUniformBallot=64, GroupNonUniformShuffle=65, StorageBuffer16BitAccess=4433, StorageBuffer8BitAccess=4448,
    VulkanMemoryModel=5345, PhysicalStorageBufferAddresses=5347, DotProductInput4x8BitPacked=6018, DotProduct=6019,
    CooperativeMatrixKHR=6022,
)  # fmt: skip
# capability: the extension that it needs
EXTENSIONS = dict(DotProduct="SPV_KHR_integer_dot_product", CooperativeMatrixKHR="SPV_KHR_cooperative_matrix")

DECORATIONS = dict(Block=2, ArrayStride=6, BuiltIn=11, Volatile=21, Coherent=23, NonWritable=24, Offset=35)
STORAGE = dict(Input=1, Workgroup=4, Function=7, PushConstant=9, PhysicalStorageBuffer=5349)
BUILTINS = dict(WorkgroupId=26, LocalInvocationId=27, SubgroupId=40, SubgroupLocalInvocationId=41)

GLSL = dict(
    RoundEven=2, Trunc=3, FAbs=4, Floor=8, Ceil=9, Sin=13, Cos=14, Tanh=21, Pow=26, Exp=27, Log=28, Exp2=29, Log2=30,
    Sqrt=31, InverseSqrt=32, FMin=37, UMin=38, SMin=39, FMax=40, UMax=41, SMax=42, Fma=50, PackHalf2x16=58,
    UnpackHalf2x16=62, NMin=79, NMax=80,
)  # fmt: skip

# scopes
DEVICE, WORKGROUP, SUBGROUP, QUEUE_FAMILY = 1, 2, 3, 5
# memory semantics
RELAXED, ACQUIRE_RELEASE, BUFFER_MEMORY, WORKGROUP_MEMORY = 0, 0x8, 0x40, 0x100
MAKE_AVAILABLE, MAKE_VISIBLE = 0x2000, 0x4000
# memory operands of loads and stores
VOLATILE, ALIGNED, MAKE_POINTER_AVAILABLE, MAKE_POINTER_VISIBLE, NON_PRIVATE = 0x1, 0x2, 0x8, 0x10, 0x20
