# The region comes from the availability domain's name; credentials from ~/.oci/config or the environment, never from a variable.
provider "oci" {
  region = lower(regex(":([A-Z0-9-]+)-AD-[1-3]$", var.zone)[0])
}

module "cluster" {
  source = "../../modules/oci"

  name             = var.name
  zone             = var.zone
  pools            = var.pools
  reservations     = var.reservations
  allow_unreserved = var.allow_unreserved
  transport        = var.transport
  network          = var.network
  nat              = var.nat
  ssh_keys         = var.ssh_keys
  allowed_clients  = var.allowed_clients
  admin_clients    = var.admin_clients
  image            = var.image
  ssh_user         = var.ssh_user
  disks            = var.disks
  prices           = var.prices
  compartment_id   = var.compartment_id
  fabric           = var.fabric
}
