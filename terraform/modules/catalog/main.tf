# Every property of every shape, one row each. Nothing else in the repository knows one.
locals {
  # What can move memory over a fabric, as "library:protocol". EFA has no reliable-connected verbs: Mooncake's "rdma" and
  # UCX do not work there, whatever the NIC's name suggests.
  fabrics = {
    roce       = { rdma = true, transports = ["mooncake:rdma", "nixl:UCX"] }
    infiniband = { rdma = true, transports = ["mooncake:rdma", "nixl:UCX"] }
    efa        = { rdma = true, transports = ["mooncake:efa", "nixl:LIBFABRIC"] }
    ethernet   = { rdma = false, transports = ["mooncake:tcp", "nixl:UCX"] }
  }

  b200 = { gpu = "B200", gpus = 8, compute_capability = "10.0", gpu_memory_gb = 180 }
  h200 = { gpu = "H200", gpus = 8, compute_capability = "9.0", gpu_memory_gb = 141 }
  h100 = { gpu = "H100", gpus = 8, compute_capability = "9.0", gpu_memory_gb = 80 }
  cpu  = { gpu = null, gpus = 0, compute_capability = null, gpu_memory_gb = 0 }

  gpu_image   = "Ubuntu 24.04 with the NVIDIA open kernel modules (R580 or newer, for CUDA 13) and the fabric manager of the very same version"
  efa_image   = "${local.gpu_image}, AWS's EFA installer"
  rdma_image  = "${local.gpu_image}, rdma-core, nvidia-peermem or dma-buf"
  plain_image = "Ubuntu 24.04 or Debian 12"

  # Where a row's figures were read, and on which day; `checked` null: nobody has compared that row with a source yet.
  ec2  = { source = "EC2 instance types as DescribeInstanceTypes reports them (Karpenter's AWS provider, website/content/en/preview/reference/instance-types.md at 2aea819); regions: SkyPilot catalog v8/aws/vms.csv at 00148f2", checked = "2026-11-30" }
  gce  = { source = "stored copy of Google Compute Engine, GPU network bandwidth (docs.cloud.google.com/compute/docs/gpus/gpu-network-bandwidth); vCPUs, memory, zones: SkyPilot catalog v8/gcp/vms.csv at 006059e", checked = "2026-11-30" }
  ocic = { source = "stored excerpts of OCI Compute Shapes (docs.oracle.com/en-us/iaas/Content/Compute/References/computeshapes.htm); RDMA NICs: Oracle's oci-hpc, ib_write_bw.sh", checked = "2026-11-30" }
  hgx  = { source = "stored excerpts of NVIDIA DGX user guides, the same HGX boards (docs.nvidia.com/dgx)", checked = "2026-11-30" }

  # nics: ordinary, RDMA. rails: RDMA NICs that reach the same NIC of other hosts. zones: where the shape is known to be
  # offered, regions or zones; empty: anywhere. local_disk_gb: NVMe inside the host.
  rows = {
    "p6-b200.48xlarge" = merge(local.b200, local.ec2, { provider = "aws", fabric = "efa", vcpus = 192, memory_gb = 2048, ordinary_nics = 1, rdma_nics = 8, rails = 8, fabric_gbps = 3200, local_disk_gb = 30400, zones = ["us-east-1", "us-east-2", "us-west-2"], image = local.efa_image })
    "p5en.48xlarge"    = merge(local.h200, local.ec2, { provider = "aws", fabric = "efa", vcpus = 192, memory_gb = 2048, ordinary_nics = 1, rdma_nics = 16, rails = 16, fabric_gbps = 3200, local_disk_gb = 30400, zones = [], image = local.efa_image })
    "p5.48xlarge"      = merge(local.h100, local.ec2, { provider = "aws", fabric = "efa", vcpus = 192, memory_gb = 2048, ordinary_nics = 1, rdma_nics = 32, rails = 32, fabric_gbps = 3200, local_disk_gb = 30400, zones = [], image = local.efa_image })
    "c7i.4xlarge"      = merge(local.cpu, { provider = "aws", fabric = "ethernet", vcpus = 16, memory_gb = 32, ordinary_nics = 1, rdma_nics = 0, rails = 0, fabric_gbps = 12.5, local_disk_gb = 0, zones = [], image = local.plain_image, source = "EC2 instance types, compute optimized (aws.amazon.com/ec2/instance-types/c7i)", checked = null })

    "a4-highgpu-8g"  = merge(local.b200, local.gce, { provider = "gcp", fabric = "roce", vcpus = 224, memory_gb = 3968, ordinary_nics = 2, rdma_nics = 8, rails = 8, fabric_gbps = 3200, local_disk_gb = 12000, zones = ["asia-northeast1-b", "asia-southeast1-b", "europe-north1-b", "europe-west4-b", "us-central1-b", "us-east1-b", "us-east4-b", "us-south1-b", "us-west2-c", "us-west3-b", "us-west3-c"], image = local.rdma_image })
    "a3-ultragpu-8g" = merge(local.h200, local.gce, { provider = "gcp", fabric = "roce", vcpus = 224, memory_gb = 2952, ordinary_nics = 2, rdma_nics = 8, rails = 8, fabric_gbps = 3200, local_disk_gb = 12000, zones = ["asia-south1-b", "asia-south2-c", "europe-west1-b", "europe-west4-a", "us-central1-b", "us-east4-b", "us-east5-a", "us-south1-b", "us-west1-c"], image = local.rdma_image })
    "c4-standard-16" = merge(local.cpu, { provider = "gcp", fabric = "ethernet", vcpus = 16, memory_gb = 60, ordinary_nics = 1, rdma_nics = 0, rails = 0, fabric_gbps = 23, local_disk_gb = 0, zones = [], image = local.plain_image, source = "Google Compute Engine, general-purpose machine family (cloud.google.com/compute/docs/general-purpose-machines)", checked = null })

    "BM.GPU.B200.8"       = merge(local.b200, local.ocic, { provider = "oci", fabric = "roce", vcpus = 256, memory_gb = 4096, ordinary_nics = 2, rdma_nics = 8, rails = 8, fabric_gbps = 3200, local_disk_gb = 30720, zones = [], image = local.rdma_image })
    "BM.GPU.H200.8"       = merge(local.h200, local.ocic, { provider = "oci", fabric = "roce", vcpus = 224, memory_gb = 3072, ordinary_nics = 1, rdma_nics = 8, rails = 8, fabric_gbps = 3200, local_disk_gb = 30720, zones = [], image = local.rdma_image })
    "BM.GPU.H100.8"       = merge(local.h100, local.ocic, { provider = "oci", fabric = "roce", vcpus = 224, memory_gb = 2048, ordinary_nics = 1, rdma_nics = 16, rails = 16, fabric_gbps = 3200, local_disk_gb = 61440, zones = [], image = local.rdma_image })
    "VM.Standard.E5.Flex" = merge(local.cpu, { provider = "oci", fabric = "ethernet", vcpus = 16, memory_gb = 64, ordinary_nics = 1, rdma_nics = 0, rails = 0, fabric_gbps = 8, local_disk_gb = 0, zones = [], image = local.plain_image, source = "OCI Compute Shapes, flexible: the size is chosen, this is ours", checked = "2026-11-30" })

    "hgx-b200-infiniband" = merge(local.b200, local.hgx, { provider = "onprem", fabric = "infiniband", vcpus = 224, memory_gb = 2048, ordinary_nics = 1, rdma_nics = 8, rails = 8, fabric_gbps = 3200, local_disk_gb = 30720, zones = [], image = local.rdma_image })
    "hgx-b200-roce"       = merge(local.b200, local.hgx, { provider = "onprem", fabric = "roce", vcpus = 224, memory_gb = 2048, ordinary_nics = 1, rdma_nics = 8, rails = 8, fabric_gbps = 3200, local_disk_gb = 30720, zones = [], image = local.rdma_image })
    "hgx-h200-infiniband" = merge(local.h200, local.hgx, { provider = "onprem", fabric = "infiniband", vcpus = 224, memory_gb = 2048, ordinary_nics = 1, rdma_nics = 8, rails = 8, fabric_gbps = 3200, local_disk_gb = 30720, zones = [], image = local.rdma_image })
    "hgx-h200-roce"       = merge(local.h200, local.hgx, { provider = "onprem", fabric = "roce", vcpus = 224, memory_gb = 2048, ordinary_nics = 1, rdma_nics = 8, rails = 8, fabric_gbps = 3200, local_disk_gb = 30720, zones = [], image = local.rdma_image })
    "hgx-h100-infiniband" = merge(local.h100, local.hgx, { provider = "onprem", fabric = "infiniband", vcpus = 224, memory_gb = 2048, ordinary_nics = 1, rdma_nics = 8, rails = 8, fabric_gbps = 3200, local_disk_gb = 30720, zones = [], image = local.rdma_image })
    "hgx-h100-roce"       = merge(local.h100, local.hgx, { provider = "onprem", fabric = "roce", vcpus = 224, memory_gb = 2048, ordinary_nics = 1, rdma_nics = 8, rails = 8, fabric_gbps = 3200, local_disk_gb = 30720, zones = [], image = local.rdma_image })
    "cpu-server"          = merge(local.cpu, { provider = "onprem", fabric = "ethernet", vcpus = 16, memory_gb = 32, ordinary_nics = 1, rdma_nics = 0, rails = 0, fabric_gbps = 10, local_disk_gb = 0, zones = [], image = local.plain_image, source = "the smallest router host this project sizes for", checked = "2026-11-30" })
  }

  # Public list prices on demand, where one was found; a contract's own figures go into the variable `prices`. `as_of` is the
  # day the figure was read. No row: none was found that states one (Google gives none for A4).
  aws_list = { as_of = "2026-11-30", source = "on demand in us-east-1, us-east-2 and us-west-2: SkyPilot catalog v8/aws/vms.csv at 00148f2" }
  oci_list = { as_of = "2026-11-30", source = "pay as you go: SkyPilot catalog v8/oci/vms.csv at 0588751" }
  prices = {
    "p6-b200.48xlarge" = merge(local.aws_list, { usd_per_hour = 113.9328 })
    "p5en.48xlarge"    = merge(local.aws_list, { usd_per_hour = 63.296 })
    "p5.48xlarge"      = merge(local.aws_list, { usd_per_hour = 55.04 })

    "BM.GPU.B200.8"       = merge(local.oci_list, { usd_per_hour = 112 })
    "BM.GPU.H200.8"       = merge(local.oci_list, { usd_per_hour = 80 })
    "BM.GPU.H100.8"       = merge(local.oci_list, { usd_per_hour = 80 })
    "VM.Standard.E5.Flex" = merge(local.oci_list, { usd_per_hour = 0.368 })
  }
}
